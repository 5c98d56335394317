"""One run from its configuration to its exit code: everything is made here and given back here."""

from __future__ import annotations

import socket
import sys
import time
from typing import TYPE_CHECKING

from flodl_shm.control.coordinator import Coordinator
from flodl_shm.control.failure import FailureReport, root_cause
from flodl_shm.control.messages import End
from flodl_shm.engine.host import Host
from flodl_shm.engine.host_loop import HostLoop
from flodl_shm.engine.rank_main import RankEntry, preload
from flodl_shm.engine.recorder import Recorder
from flodl_shm.errors import FlodlError
from flodl_shm.ids import Nanos
from flodl_shm.obs.journal import Journal
from flodl_shm.obs.metrics import MetricsFile
from flodl_shm.obs.progress import Progress, View
from flodl_shm.obs.run_dir import RunDir, write_json
from flodl_shm.obs.summary import summary, versions
from flodl_shm.obs.tally import RunFacts as TallyFacts
from flodl_shm.obs.tally import Tally
from flodl_shm.proc.environment import RunFacts, threads_per_rank, usable_cores
from flodl_shm.proc.fork_server import ForkServer
from flodl_shm.proc.lifeline import Lifeline
from flodl_shm.proc.signals import SignalPipe, die_of
from flodl_shm.proc.supervisor import Supervisor
from flodl_shm.shm.control_block import ControlBlock
from flodl_shm.shm.janitor import sweep

if TYPE_CHECKING:
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.proc.error_file import ErrorReport


def launch(config: RunConfig) -> int:
    """Run it; the exit code. A run stopped by a signal ends this process by that signal.

    Raises FlodlError for what forbids a start.
    """
    started_at = Nanos(time.monotonic_ns())
    swept = sweep()
    run_dir = RunDir.create(config.run_root, ranks=config.ranks, name=config.name)
    signals = SignalPipe()
    lifeline = Lifeline()
    try:
        block = ControlBlock(config.ranks)
        # Forked before anything else is opened or started: ranks inherit what exists now.
        entry = RankEntry(block, lifeline.read_fd)
        server = ForkServer.start(entry, preload=preload, lifeline=lifeline)
        try:
            recorder = _recorder(config, run_dir, started_at)
            for name in swept:
                recorder.say(f"removed {name}, left by a run that is gone")
            host = Host(
                config,
                run_dir,
                facts=_facts(config, run_dir),
                block=block,
                supervisor=Supervisor(server),
            )
            return _drive(host, recorder, signals, server)
        finally:
            server.close()
            block.close()
    finally:
        signals.restore()
        lifeline.close()


def _drive(host: Host, recorder: Recorder, signals: SignalPipe, server: ForkServer) -> int:
    config, run_dir = host.config, host.run_dir
    recorder.progress.start(run_dir.run_id, run_dir.path)
    loop = HostLoop(host, Coordinator(config.wishes, config.ranks), recorder, signals)
    try:
        end = loop.run()
    finally:
        server.close()  # with every rank that is left, whatever went wrong
        host.supervisor.close()
        host.close()
    if end.status == "ok" and loop.user_failed:
        end = End(status="failed", exit_code=1, reason="the script failed after the training")
        recorder.action(end, Nanos(time.monotonic_ns()))
    _report_end(host, recorder, end)
    if loop.stopped_by and end.status == "stopped":
        signals.restore()
        die_of(loop.stopped_by)
    return end.exit_code


def _report_end(host: Host, recorder: Recorder, end: End) -> None:
    """Write the summary, show the end, and the first cause of a failure last of all."""
    recorder.close()
    told = summary(recorder.tally, now=Nanos(time.monotonic_ns()))
    targets = [host.run_dir.summary]
    if host.config.summary is not None:
        targets.append(host.config.summary)
    for target in targets:
        try:
            write_json(target, told)
        except FlodlError as error:
            recorder.say(str(error))
    recorder.progress.end(told, host.run_dir.path)
    if end.exit_code:
        _show_failure(host, end)


def _show_failure(host: Host, end: End) -> None:
    cause = _first(host.errors)
    if cause is None:
        print(f"error: {end.reason}", file=sys.stderr)
    elif cause.cause == "refused":
        print(f"error: {cause.message} (rank {cause.rank})", file=sys.stderr)
    else:
        device = host.config.devices[cause.rank]
        print(f"rank {cause.rank} ({device}) failed first", file=sys.stderr)
        print(f"  full report  {host.run_dir.error_file(cause.rank)}", file=sys.stderr)
        print(cause.traceback.rstrip(), file=sys.stderr)


def _first(errors: list[ErrorReport]) -> ErrorReport | None:
    """The report of the rank that failed first, not of one that failed because of it."""
    first = root_cause(FailureReport(e.rank, e.kind, e.message, e.at) for e in errors)
    return next((e for e in errors if first and (e.rank, e.at) == (first.rank, first.at)), None)


def _recorder(config: RunConfig, run_dir: RunDir, started_at: Nanos) -> Recorder:
    facts = TallyFacts(
        workload=config.title,
        backend=config.backend,
        world_size=config.ranks,
        devices=config.devices,
        started_at=started_at,
    )
    tally = Tally(facts)
    mode = "line" if config.progress == "auto" else config.progress
    view = View(mode=mode, quiet=config.quiet, verbose=config.verbose)
    progress = Progress(tally, sys.stdout, view)
    journal = Journal(run_dir.journal, warn=progress.say)
    wall = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    journal.header(run_id=run_dir.run_id, started=wall, at=started_at, versions=versions())
    run_dir.write_settings(
        {
            "started": wall,
            "workload": config.title,
            "ranks": config.ranks,
            "devices": config.devices,
            "options": {name: str(source) for name, source in config.sources.items()},
            "wishes": config.wishes,
        }
    )
    metrics = MetricsFile(run_dir.metrics, warn=progress.say)
    return Recorder(journal=journal, tally=tally, metrics=metrics, progress=progress)


def _facts(config: RunConfig, run_dir: RunDir) -> RunFacts:
    return RunFacts(
        world_size=config.ranks,
        run_id=run_dir.run_id,
        run_dir=run_dir.path,
        threads=threads_per_rank(usable_cores(), config.ranks),
        master_port=_free_port(),
    )


def _free_port() -> int:
    """A port nobody uses now, for scripts that start torch.distributed; nothing listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
