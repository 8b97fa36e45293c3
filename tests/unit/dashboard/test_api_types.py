"""The TypeScript types of the pages follow from the API."""

import pytest
from tests.repository_modules import load_script


def test_the_types_of_the_pages_are_those_of_the_api():
    with load_script("generate_api_types") as script:
        assert script.TYPES.read_text() == script.generate(), "run `python scripts/generate_api_types.py`"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "number"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "Value"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "(string | null)[]"),
        ({"type": "object", "additionalProperties": {"$ref": "#/components/schemas/Run"}}, "Record<string, Run>"),
        ({"enum": ["a", "b"]}, '"a" | "b"'),
        ({}, "unknown"),
    ],
)
def test_a_schema_becomes_a_type(schema, expected):
    with load_script("generate_api_types") as script:
        assert script.type_of(schema) == expected
