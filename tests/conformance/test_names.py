"""Is every public name of Keras judged? Fast: nothing is trained."""

import pytest

from tests.conformance import page
from tests.conformance.catalogue import catalogue
from tests.conformance.known_differences import KNOWN, known
from tests.conformance.places import DISTRIBUTED
from tests.conformance.programs import PROGRAMS

NAMES = catalogue()


def judged(family):
    """Returns the names of a family that have a recipe, or a reason why they are not run."""
    tried = {item for program in PROGRAMS.values() if program.family == family for item in program.items}
    excused = {
        name
        for name in NAMES[family]
        if (entry := known("workers", family, name)) and entry.kind == "not run"
    }
    return tried | excused


@pytest.mark.parametrize("family", NAMES)
def test_every_public_name_of_keras_has_a_recipe_or_a_reason(family):
    assert not [name for name in NAMES[family] if name not in judged(family)]


def test_what_is_known_is_a_name_that_is_tried_or_excused():
    for family, entries in KNOWN.items():
        tried = {item for program in PROGRAMS.values() if program.family == family for item in program.items}
        excused = {name for name, found in entries.items() if found[0].kind == "not run"}
        assert not set(entries) - tried - excused


def test_no_name_has_two_entries_for_one_place():
    for entries in KNOWN.values():
        for found in entries.values():
            places = [place for entry in found for place in entry.places]
            assert len(places) == len(set(places)) and set(places) <= set(DISTRIBUTED)


def test_the_page_says_all_that_is_known():
    text = page.page()
    assert not [name for entries in KNOWN.values() for name in entries if f"`{name}`" not in text]
