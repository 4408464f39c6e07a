"""Every rule across fields, in Python; `test_rules_in_cluster.py` has the same cases in CEL."""

import pytest
from pydantic import ValidationError

from kimi_operator.api.base import ApiModel, Rule
from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.schema import models_of
from kimi_operator.api.workers import KimiWorkers
from rule_cases import CASES, RuleCase, document


def _all_rules() -> list[tuple[type[ApiModel], Rule]]:
    models = {**models_of(KimiDeployment), **models_of(KimiWorkers)}
    return [(model, rule) for model in models.values() for rule in model.rules]


def _problems(spec: dict[str, object]) -> list[str]:
    try:
        KimiDeployment.model_validate(document(spec))
    except ValidationError as exc:
        return [error["msg"] for error in exc.errors()]
    return []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_a_spec_that_breaks_a_rule_is_refused_for_that_reason(case: RuleCase):
    assert any(case.says in problem for problem in _problems(case.bad))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says)
def test_the_nearest_spec_that_keeps_the_rule_is_taken(case: RuleCase):
    assert _problems(case.good) == []


def test_every_rule_has_a_case():
    untried = [
        f"{model.__name__}: {rule.message}"
        for model, rule in _all_rules()
        if model is not KimiDeployment and not any(case.says in rule.message for case in CASES)
    ]
    assert untried == []


def test_a_rule_without_cel_says_why():
    assert [rule.message for _, rule in _all_rules() if not (rule.cel or rule.why_not_cel)] == []


@pytest.mark.parametrize("name", ["a" * 31, "Kimi", "1kimi", "kimi-", "kimi.nano", ""])
def test_a_name_that_cannot_become_a_label_is_refused(name: str):
    with pytest.raises(ValidationError):
        KimiDeployment.model_validate(document({"preset": "p"}, name))


def test_the_engine_cannot_be_changed():
    (rule,) = KimiDeployment.model_fields["spec"].annotation.update_rules
    old = KimiDeployment.model_validate(document({"preset": "p"})).spec
    new = KimiDeployment.model_validate(document({"preset": "p", "engine": "vllm"})).spec
    assert rule.holds(old, old)
    assert not rule.holds(old, new)
