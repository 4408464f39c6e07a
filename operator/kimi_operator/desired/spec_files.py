"""Files that our own processes start from."""

from collections.abc import Set as AbstractSet

from pydantic import BaseModel


def spec_file(spec: BaseModel, without: AbstractSet[str] = frozenset()) -> str:
    """The fields that were given, as JSON, but for those `without` which it is to be.

    A process of an older image refuses fields that it does not know, and a user may keep that image
    under a newer operator. Of a nested model everything is written: it may be what tells its kind.
    """
    unset = type(spec).model_fields.keys() - spec.model_fields_set
    return spec.model_dump_json(indent=2, exclude={*unset, *without}) + "\n"
