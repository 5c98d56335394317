"""Variables that look like options."""

from __future__ import annotations

from flodl_shm.cli.run import run
from flodl_shm.cli.strangers import strangers


def test_a_misspelt_variable_is_named_with_the_nearest_option():
    (told,) = strangers({"FLODL_RNAKS": "4"}, run.params)
    assert told.startswith("the environment variable FLODL_RNAKS is no option")
    assert told.endswith("did you mean FLODL_RANKS?")


def test_every_options_variable_and_those_of_ranks_are_no_strangers():
    known = {name: "" for one in run.params for name in one.envvar or ()}
    assert "FLODL_BATCH_SIZE" in known
    assert strangers(known | {"FLODL_RUN_ID": "x", "PATH": "/bin"}, run.params) == []
