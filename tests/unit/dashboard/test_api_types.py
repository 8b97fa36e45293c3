"""The TypeScript types of the pages follow from the API."""

from tests.repository_modules import load_script


def test_the_types_of_the_pages_are_those_of_the_api():
    with load_script("generate_api_types") as script:
        assert script.TYPES.read_text() == script.generate(), "run `python scripts/generate_api_types.py`"
