"""One run from its configuration to its exit code: everything is made here and given back here."""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flodl_shm.control.messages import End
from flodl_shm.control.rejoin import rows_for
from flodl_shm.engine.ending import first_error, report_end
from flodl_shm.engine.host import Host
from flodl_shm.engine.rank_main import RankEntry, preload
from flodl_shm.engine.recorder import Recorder
from flodl_shm.engine.runs import Runs
from flodl_shm.engine.saving import flags_of, prepare
from flodl_shm.engine.scarcity import scarcity_told
from flodl_shm.engine.settings import SettingsFile
from flodl_shm.engine.spawned import SpawnEntry, preload_nothing
from flodl_shm.engine.view import open_view
from flodl_shm.errors import BadConfig, HostUnfit
from flodl_shm.ids import Nanos
from flodl_shm.obs.journal import Journal
from flodl_shm.obs.metrics import MetricsFile
from flodl_shm.obs.run_dir import RunDir
from flodl_shm.obs.summary import versions
from flodl_shm.obs.tally import RunFacts as TallyFacts
from flodl_shm.obs.tally import Tally
from flodl_shm.proc import failpoints
from flodl_shm.proc.environment import RunFacts, threads_per_rank, usable_cores
from flodl_shm.proc.fork_server import ForkServer
from flodl_shm.proc.lifeline import Lifeline
from flodl_shm.proc.signals import SignalPipe, die_of
from flodl_shm.proc.standard_streams import fill_standard_streams
from flodl_shm.proc.supervisor import Supervisor
from flodl_shm.shm.control_block import ControlBlock
from flodl_shm.shm.janitor import sweep

if TYPE_CHECKING:
    from flodl_shm.control.resume import Resume
    from flodl_shm.engine.config import RunConfig
    from flodl_shm.engine.host_loop import HostLoop
    from flodl_shm.engine.recorder import OnMetrics


def launch(config: RunConfig) -> int:
    """Run it; the exit code. A run stopped by a signal ends this process by that signal.

    Raises FlodlError for what forbids a start.
    """
    outcome = conduct(config)
    if outcome.stopped_by:
        die_of(outcome.stopped_by)
    return outcome.end.exit_code


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run, or of a script's last one, when nothing of it is there any more."""

    end: End
    stopped_by: int  # the signal it was stopped by; 0: by none
    value: float | None  # of the final evaluation
    run_dir: RunDir


@scarcity_told()
def conduct(config: RunConfig, *, on_metrics: OnMetrics | None = None) -> Outcome:
    """Run it, from the first file to the last process, and report its end on the screen.

    `on_metrics` is called here with what every rank is told of an epoch. Raises as `launch` does.
    """
    started_at = Nanos(time.monotonic_ns())
    fill_standard_streams()  # before anything is opened, or it would be taken for one of them
    _check_place(config)
    failpoints.arm(os.environ, rank=None)
    begin = prepare(config)
    swept = sweep()
    run_dir = RunDir.create(config.run_root, ranks=config.ranks, name=config.name)
    signals = SignalPipe()
    lifeline = Lifeline()
    try:
        rows = rows_for(config.ranks, config.survival.restarts)
        block = ControlBlock(rows, semaphores=config.start == "fork")
        # Forked before anything else is opened or started: ranks inherit what exists now.
        if config.start == "fork":
            entry = RankEntry(block, lifeline.read_fd)
            server = ForkServer.start(entry, preload=preload, lifeline=lifeline)
        else:
            fresh = SpawnEntry(block, lifeline.read_fd)
            server = ForkServer.start(fresh, preload=preload_nothing, lifeline=lifeline)
        try:
            open_recorder = partial(_recorder, config, on_metrics)
            recorder = open_recorder(run_dir, started_at, 1, begin.resume)
            for name in swept:
                recorder.say(f"removed {name}, left by a run that is gone")
            for sentence in begin.told:
                recorder.say(sentence)
            host = Host(
                config,
                run_dir,
                facts=_facts(config, run_dir),
                block=block,
                supervisor=Supervisor(server),
            )
            runs = Runs(
                host,
                signals,
                first=recorder,
                open_recorder=open_recorder,
                resume=begin.resume,
            )
            return _drive(host, runs, server)
        finally:
            server.close()
            block.close()
    finally:
        signals.restore()
        lifeline.close()
        failpoints.disarm()


def _check_place(config: RunConfig) -> None:
    """Refuse a current directory that is gone, and names that no message can carry."""
    try:
        here = os.getcwd()
    except OSError as error:
        raise HostUnfit(
            f"the current directory cannot be used: {error.strerror}", hint="Change to another."
        ) from None
    for name in (here, str(config.run_root), str(config.script or ""), *config.script_args):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise BadConfig(
                f"{name!a} is no UTF-8",
                hint="Names of files and a script's arguments travel to the ranks as text.",
            ) from None


def _drive(host: Host, runs: Runs, server: ForkServer) -> Outcome:
    try:
        end = runs.drive()
    finally:
        runs.recorder.progress.close()  # whatever comes now is said on a plain terminal
        server.close()  # with every rank that is left, whatever went wrong
        host.supervisor.close()
        host.close()
    loop, recorder = runs.loop, runs.recorder
    end = _after_all(end, loop)
    if end is not loop.end:
        recorder.remark(end, Nanos(time.monotonic_ns()))
    report_end(host, recorder, end)
    stopped_by = loop.stopped_by if end.status == "stopped" else 0
    return Outcome(end, stopped_by, loop.coordinator.value, host.run_dir)


def _after_all(end: End, loop: HostLoop) -> End:
    """What is known of the end when every process is gone."""
    if loop.failed is None or end.status == "stopped":
        return end
    # Of ranks that fail together the one whose process ends first need not have failed first.
    cause = first_error(loop.host.errors)
    rank, why = (
        (loop.failed.rank, loop.failed.cause) if cause is None else (cause.rank, cause.headline())
    )
    if end.status == "ok":
        reason = f"rank {rank} failed after the training: {why}"
        return End(status="failed", exit_code=loop.failed.exit_code, reason=reason)
    # The last ranks may have left with the very exception: it is what has ended the run.
    code = loop.failed.exit_code if loop.failed.rank in loop.left else end.exit_code
    if rank != loop.failed.rank or code != end.exit_code:
        reason = f"rank {rank} failed: {why}"
        return End(status="failed", exit_code=code, reason=reason)
    return end


def _recorder(
    config: RunConfig,
    on_metrics: OnMetrics | None,
    run_dir: RunDir,
    started_at: Nanos,
    number: int,
    resume: Resume | None = None,
) -> Recorder:
    facts = TallyFacts(
        workload=config.title,
        backend=config.backend,
        world_size=config.ranks,
        devices=config.devices,
        started_at=started_at,
    )
    tally = Tally(facts)
    progress = open_view(config, tally, sys.stderr if config.as_json else sys.stdout, sys.stderr)
    journal = Journal(run_dir.journal, warn=progress.say)
    wall = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    journal.header(
        run_id=run_dir.run_id,
        started=wall,
        at=started_at,
        versions=versions(),
        world_size=config.ranks,
        flags=flags_of(config, number),
        resume=resume,
    )
    told = SettingsFile(run_dir, config, started=wall, warn=progress.say)
    metrics = MetricsFile(run_dir.metrics, warn=progress.say)
    return Recorder(
        journal=journal,
        tally=tally,
        settings=told,
        metrics=metrics,
        progress=progress,
        on_metrics=on_metrics,
    )


def _facts(config: RunConfig, run_dir: RunDir) -> RunFacts:
    return RunFacts(
        world_size=config.ranks,
        run_id=run_dir.run_id,
        run_dir=run_dir.path,
        threads=None if config.threads else threads_per_rank(usable_cores(), config.ranks),
        master_port=_free_port(),
    )


def _free_port() -> int:
    """A port nobody uses now, for scripts that start torch.distributed; nothing listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
