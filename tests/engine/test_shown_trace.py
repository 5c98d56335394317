"""What the screen leaves out of a traceback, and what it never does."""

from __future__ import annotations

from flodl_shm.engine.shown_trace import without_ours

HEAD = "Traceback (most recent call last):"
RUN = '  File "/mine/train.py", line 11, in <module>\n    trainer.run()\n    ^^^^^^^^^^^^^'
OURS = '  File "/lib/flodl_shm/train/trainer.py", line {}, in run\n    self.go()'
STEP = '  File "/mine/train.py", line 4, in step\n    raise KeyError("x")'
ERROR = "KeyError: 'x'"


def lines(*parts):
    return "\n".join(parts)


def shown(*parts):
    return without_ours(lines(*parts), root="/lib/flodl_shm")


def test_calls_of_ours_between_the_users_are_counted():
    trace = (HEAD, RUN, OURS.format(1), OURS.format(2), STEP, ERROR)
    assert shown(*trace) == lines(HEAD, RUN, "  ... 2 calls inside flodl_shm", STEP, ERROR)
    assert "  ... 1 call inside flodl_shm\n" in shown(HEAD, RUN, OURS.format(1), STEP, ERROR)


def test_what_broke_in_our_files_is_shown_there():
    trace = (HEAD, RUN, OURS.format(1), ERROR)
    assert shown(*trace) == lines(*trace)


def test_each_traceback_of_a_chain_stands_for_itself():
    again = "\nDuring handling of the above exception, another exception occurred:\n"
    first = (HEAD, OURS.format(1), ERROR)
    assert shown(*first, again, HEAD, RUN, OURS.format(3), STEP, ERROR) == lines(
        *first, again, HEAD, RUN, "  ... 1 call inside flodl_shm", STEP, ERROR
    )


def test_other_text_is_left_as_it_is():
    for text in ("", ERROR, "SyntaxError: bad\n    x = = 1\n        ^", RUN, STEP):
        assert without_ours(text) == text
