"""What `kimistack capacity -f FILE` is asked about."""

from pathlib import Path

from pydantic import ValidationError

from kimi_operator.api.load import parse_mapping, read_text
from kimi_operator.desired.capacity import capacity_of
from kimi_operator.local.up import effective_of
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.capacity import CapacitySpec

EXAMPLE = "the packaged example"


def capacity_spec(file: Path | None) -> CapacitySpec:
    """A KimiDeployment's model and GPUs, or those a file names alone; None: the example's.

    Raises ConfigError naming file and field.
    """
    if file is None:
        return capacity_of(effective_of(None), EXAMPLE)
    document = parse_mapping(read_text(file), str(file))
    if "kind" in document or "apiVersion" in document:
        return capacity_of(effective_of(file), str(file))
    try:
        return CapacitySpec.model_validate(document)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"{file}: {where}: {first['msg']}") from exc
