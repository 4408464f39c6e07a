"""The routing policy in a router's file, with the speeds that it starts from."""

from pathlib import Path

from kimi_operator.api.router import Router
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.fit import known_model
from kimi_runtime.spec.hardware import MI355X, NODES
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.spec.published import K26
from kimi_runtime.spec.router import (
    Cost,
    ExplainSpec,
    LeastLoad,
    LongestPrefix,
    PolicySpec,
    SessionAdmission,
)


def policy_of(effective: Effective) -> PolicySpec:
    """What `router.policy` asks for."""
    spec = effective.deployment.spec
    match spec.router.policy:
        case "longest_prefix":
            return LongestPrefix()
        case "least_load":
            return LeastLoad()
        case "cost":
            return _cost(effective)


def session_admission_of(router: Router) -> SessionAdmission:
    """What `router.sessionAdmission` asks for."""
    asked = router.session_admission
    return SessionAdmission(enabled=None if asked is None else asked == "Enabled")


def explain_of(router: Router, path: Path) -> ExplainSpec | None:
    """What `router.explain` asks for, written to this file; other policies have no reasons."""
    if router.policy != "cost" or not router.explain.max_bytes:
        return None
    return ExplainSpec(path=path, max_bytes=router.explain.max_bytes)


def _cost(effective: Effective) -> Cost:
    """Speeds of the preset's model and GPU; what is not known here starts as K2.6 on the MI355X
    does, and what is measured replaces it.
    """
    spec, preset = effective.deployment.spec, effective.preset
    model = known_model(preset.architecture if preset else spec.model.id) or K26
    if model.name == KIMI_NANO.name:
        return Cost(model=model.name, gpu="cpu", tensor=1)
    gpu = preset.hardware if preset and preset.hardware in NODES else MI355X.name
    role = spec.prefill or spec.decode
    tensor = role.parallelism.tp if role else 1
    return Cost(model=model.name, gpu=gpu, tensor=tensor)
