"""What failed is told with type, message, file and line, whatever the exception does."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from flodl_shm.ids import Rank, Row
from flodl_shm.proc.error_file import (
    ErrorReport,
    in_words,
    is_users,
    read_error,
    write_error,
    write_for,
)

if TYPE_CHECKING:
    from pathlib import Path


def caught(act):
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def report_of(path: Path, error: BaseException | None, **more):
    assert write_error(path, error, rank=Rank(2), row=Row(5), cause="exception", **more) is None
    report = read_error(path)
    assert report is not None
    return report


def fail_in_a_library():
    json.loads("{")  # the users' line is this one


def test_a_report_comes_back_whole(tmp_path):
    report = report_of(tmp_path / "error.json", caught(fail_in_a_library), recent=["a", "b"])
    assert (report.rank, report.row, report.pid, report.cause) == (2, 5, os.getpid(), "exception")
    assert report.kind == "json.decoder.JSONDecodeError"
    assert report.message.startswith("Expecting property name")
    assert report.file == __file__
    assert report.line == fail_in_a_library.__code__.co_firstlineno + 1
    assert "the users' line is this one" in report.traceback
    assert report.recent == ("a", "b")
    assert report.at > 0
    assert report.headline().endswith(f"({__file__}:{report.line})")
    assert [p.name for p in tmp_path.iterdir()] == ["error.json"]


def test_stacks_of_all_threads_are_there(tmp_path):
    leave = threading.Event()

    def wait_for_the_test():
        leave.wait(20)

    thread = threading.Thread(target=wait_for_the_test, name="loader")
    thread.start()
    try:
        report = report_of(tmp_path / "e", None)
    finally:
        leave.set()
        thread.join()
    first, *others = report.stacks.items()
    assert first[0].startswith("MainThread")
    assert any(name.startswith("loader") and "wait_for_the_test" in text for name, text in others)
    assert report.headline() == "exception"


class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


class Worse(Exception):
    def __str__(self):
        raise SystemExit(3)


def raise_chain():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


def raise_group():
    raise BaseExceptionGroup("several", [KeyError("inner"), KeyboardInterrupt()])


def recurse():
    return recurse()


def raise_it(error):
    def act():
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (raise_it(Broken()), "its __str__ raised RuntimeError"),
        (raise_it(Worse()), "its __str__ raised SystemExit"),
        (raise_it(ValueError("lone \udc80 surrogate")), "lone"),
        (raise_it(ValueError("x" * 10_000_000)), "... (cut) ..."),
        (raise_it(ValueError("nul \0")), "nul \0"),
        (recurse, "maximum recursion depth"),
        (raise_it(KeyboardInterrupt()), ""),
    ],
)
def test_odd_exceptions_are_told_too(tmp_path, act, words):
    report = report_of(tmp_path / "e", caught(act))
    assert words in report.message
    assert report.file == __file__
    assert report.traceback
    assert (tmp_path / "e").stat().st_size < 2_000_000


def test_chains_and_groups_are_told_in_full(tmp_path):
    chain = report_of(tmp_path / "a", caught(raise_chain))
    assert "KeyError: 'first'" in chain.traceback
    assert "direct cause" in chain.traceback
    group = report_of(tmp_path / "b", caught(raise_group))
    assert "KeyError: 'inner'" in group.traceback
    assert "KeyboardInterrupt" in group.traceback


def test_a_syntax_error_names_the_users_file(tmp_path):
    error = caught(lambda: compile("a b c", "/home/me/train.py", "exec"))
    report = report_of(tmp_path / "e", error)
    assert report.where() == "/home/me/train.py:1"


def test_an_exception_never_raised_has_no_place(tmp_path):
    assert report_of(tmp_path / "e", ValueError("x")).headline() == "ValueError: x"


class Spelled(str):
    """As torch words a KeyError of a loader's worker, so that its lines stay lines."""

    __slots__ = ()

    def __repr__(self):
        return self


def test_a_message_of_another_kind_of_text_is_told_and_its_first_line_heads_it(tmp_path):
    error = KeyError(Spelled("Caught KeyError in a worker.\nOriginal Traceback: ..."))
    report = report_of(tmp_path / "e", error)
    assert report.message.endswith("Original Traceback: ...")
    assert report.headline() == "KeyError: Caught KeyError in a worker."


def test_the_first_failure_of_a_process_stands(tmp_path):
    path = tmp_path / "e"
    report_of(path, ValueError("the cause"))
    assert report_of(path, ValueError("a consequence")).message == "the cause"
    assert write_error(path, ValueError("later"), rank=Rank(2), row=Row(6), cause="x") is None
    assert read_error(path).message == "later"  # type: ignore[union-attr]


def test_a_file_that_cannot_be_written_is_a_reason_and_no_exception(tmp_path):
    (tmp_path / "file").touch()  # a directory that is gone would be made again
    why = write_error(tmp_path / "file" / "e", None, rank=Rank(0), row=Row(0), cause="x")
    assert "File exists" in (why or "")


@pytest.mark.parametrize(
    "junk", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"rank": "x"}', b"[" * 100_000, b"{}" * 9]
)
def test_junk_is_no_report(tmp_path, junk):
    path = tmp_path / "e"
    path.write_bytes(junk)
    assert read_error(path) is None


def test_no_file_and_a_directory_are_no_report(tmp_path):
    assert read_error(tmp_path / "none") is None
    assert read_error(tmp_path) is None


def test_an_error_in_words_is_one_line_and_a_traceback():
    line, trace = in_words(caught(fail_in_a_library))
    assert line.startswith("json.decoder.JSONDecodeError: Expecting")
    place = fail_in_a_library.__code__.co_firstlineno + 1
    assert line.endswith(f"test_error_file.py:{place})")
    assert "\n" not in line
    assert trace.startswith("Traceback")
    assert in_words(SystemExit()) == ("SystemExit", "SystemExit\n")


def test_of_one_that_hangs_another_writes_but_not_over_its_own_word(tmp_path):
    place = tmp_path / "ranks" / "error.json"
    hung = ErrorReport(Rank(1), Row(5), os.getpid(), "step", 7, kind="Stalled", file="a.py", line=3)
    assert write_for(place, hung) is None
    assert read_error(place) == hung
    later = ErrorReport(Rank(1), Row(6), os.getpid(), "data", 9, kind="Stalled")
    assert write_for(place, later) is None
    assert read_error(place) == later
    write_error(place, ValueError("its own"), rank=Rank(1), row=Row(7), cause="exception")
    assert write_for(place, ErrorReport(Rank(1), Row(7), os.getpid(), "step", 9)) is None
    assert read_error(place).message == "its own"


def test_where_another_cannot_write_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    report = ErrorReport(Rank(1), Row(5), 3, "step", 7)
    assert "File exists" in write_for(tmp_path / "file" / "error.json", report)


def test_whose_a_file_is():
    assert is_users(__file__)
    assert not is_users(json.__file__)
    assert not is_users("<frozen runpy>")
    assert not is_users(in_words.__code__.co_filename)
