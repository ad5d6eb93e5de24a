"""Hands chunks to whichever worker is free, and to another one if a worker is lost."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import ray
from ray.exceptions import RayError

from flowgrpo_rc.rollout.engine import EngineError
from flowgrpo_rc.workers.cluster import PoolSettings
from flowgrpo_rc.workers.worker import Handle, Reference, Worker

_KEPT_VERSIONS = 2  # more than a run with staleness needs besides its newest


# What the pool tells of its workers since it was asked last, as metrics. See docs/metric_names.py.
STATUS = ("busy_fraction", "ready", "longest_queue", "mib_received", "restarts")


class WorkerPool:
    """An asynchronous Ray actor that owns the workers; all processes of a run share it.

    References, such as those to `make_engine` and to a LoRA, travel in lists of one, which Ray does
    not replace by what they refer to.
    """

    def __init__(
        self, make_engine: list[Reference], settings: PoolSettings, versions: Mapping[str, str]
    ) -> None:
        """Starts no worker yet. A worker whose packages have other `versions` will be refused."""
        self._make_engine = make_engine
        self._settings = settings
        self._versions = dict(versions)
        self._free: asyncio.Queue[Handle] = asyncio.Queue()
        self._order = asyncio.Lock()
        self._adapters: dict[int, list[Reference]] = {}
        self._new_adapter = asyncio.Condition()
        self._waiting = 0
        self._alive = 0  # also those that start
        self._ready = 0
        self._none_since = time.monotonic()  # as long as none is ready; or the last that loads
        self._restarts = 0
        self._lost: list[str] = []
        self._busy = 0
        self._busy_s = 0.0
        self._counted_at = self._told_at = time.monotonic()
        self._num_bytes = 0
        self._longest_queue = 0
        self._starting: set[asyncio.Task[None]] = set()
        # By machine; in turn one may load until it is known what it takes.
        self._loading: Counter[str] = Counter()
        most = 1 if settings.in_turn else settings.num_workers
        self._may_load: defaultdict[str, int] = defaultdict(lambda: most)
        self._turn_over = asyncio.Condition()

    async def start(self) -> None:
        """Starts the workers, and waits for the first of them. EngineError if none starts."""
        for _ in range(self._settings.num_workers):
            self._start_one()
        self._free.put_nowait(await self._next())

    async def put_adapter(self, version: int, adapter: list[Reference]) -> None:
        """Takes a version of the LoRA."""
        self._adapters[version] = adapter
        oldest = version - self._settings.staleness - _KEPT_VERSIONS
        self._adapters = {v: past for v, past in self._adapters.items() if v >= oldest}
        async with self._new_adapter:
            self._new_adapter.notify_all()

    async def sample(self, request: list[Reference], rows: range, version: int) -> list[Reference]:
        """Has rows of a request sampled, and again by another worker if one is lost.

        Another process than the one that asks puts the version of the LoRA here, maybe later.

        Returns:
          A reference to the `SampledChunk`. EngineError if no worker is left.
        """
        async with self._new_adapter:
            await self._new_adapter.wait_for(lambda: version in self._adapters)
        while True:
            worker = await self._next()
            done, chunk = worker.sample.options(num_returns=2).remote(
                request[0], rows, version, self._adapters[version]
            )
            self._count_busy(+1)
            try:
                num_bytes: int = await asyncio.wait_for(done, self._settings.timeout_s)
            except (RayError, TimeoutError) as error:
                self._ready -= 1
                self._none_since = time.monotonic()
                self._replace(worker, _reason(error, self._settings.timeout_s))
                continue
            finally:
                self._count_busy(-1)
            self._num_bytes += num_bytes
            self._free.put_nowait(worker)
            return [chunk]

    async def status(self) -> tuple[dict[str, float], list[str]]:
        """Returns `STATUS` since the last call, and why workers were lost, in words."""
        self._count_busy(0)
        seconds = self._counted_at - self._told_at
        busy_fraction = self._busy_s / max(seconds * self._settings.num_workers, 1e-9)
        mib = self._num_bytes / 2**20
        values = (busy_fraction, self._ready, self._longest_queue, mib, self._restarts)
        lost = self._lost
        self._busy_s = 0.0
        self._told_at = self._counted_at
        self._num_bytes = 0
        self._longest_queue = self._waiting
        self._lost = []
        return dict(zip(STATUS, values, strict=True)), lost

    async def _next(self) -> Handle:
        """Waits for a free worker; those who came first get one first."""
        self._waiting += 1
        self._longest_queue = max(self._longest_queue, self._waiting - self._free.qsize())
        try:
            # A queue may serve a newcomer before those who wait: the next step would overtake.
            async with self._order:
                worker = await self._freed()
        finally:
            self._waiting -= 1
        if worker is None:
            self._free.put_nowait(None)  # for the others who wait
            raise EngineError(f"no rollout worker is left: {'; '.join(self._lost[-3:])}")
        return worker

    async def _freed(self) -> Handle:
        while True:
            try:
                return await asyncio.wait_for(self._free.get(), self._settings.timeout_s)
            except TimeoutError:
                waited = time.monotonic() - self._none_since
                if not self._ready and waited >= self._settings.timeout_s:
                    raise EngineError(self._none_started()) from None

    def _none_started(self) -> str:
        settings = self._settings
        resources = ray.cluster_resources()
        return (
            f"no rollout worker has started within rollout.worker_timeout_s="
            f"{settings.timeout_s:g}: each asks for {settings.num_cpus} cores "
            f"(rollout.cpus_per_worker) and {settings.num_gpus:g} GPUs (rollout.gpus_per_worker), "
            f"and the cluster has {resources.get('CPU', 0):g} and {resources.get('GPU', 0):g}"
            + "".join(f"; {reason}" for reason in self._lost[-3:])
        )

    def _count_busy(self, change: int) -> None:
        now = time.monotonic()
        self._busy_s += self._busy * (now - self._counted_at)
        self._counted_at = now
        self._busy += change

    def _start_one(self) -> None:
        self._alive += 1
        task = asyncio.get_running_loop().create_task(self._started())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _started(self) -> None:
        """Starts a worker, and sets it free if its packages are the trainer's.

        It may wait for a machine to join the cluster.
        """
        settings = self._settings
        options = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
        remote: Handle = ray.remote(Worker)
        worker = remote.options(**options).remote(settings.num_cpus)
        try:
            machine = await worker.machine.remote()
            async with self._turn(machine):
                self._none_since = time.monotonic()  # it has all its time, whoever came before
                loaded = worker.load.remote(self._make_engine[0])
                versions, room = await asyncio.wait_for(loaded, settings.timeout_s)
                if settings.in_turn:
                    self._may_load[machine] = max(1, int(room))
        except (RayError, TimeoutError) as error:
            self._replace(worker, f"did not start: {_reason(error, settings.timeout_s)}")
            return
        if versions == self._versions:
            self._ready += 1
            self._free.put_nowait(worker)
            return
        others = [
            f"{name} {versions.get(name)} there, {version} here"
            for name, version in self._versions.items()
            if versions.get(name) != version
        ]
        self._drop(worker, f"has other packages than the trainer: {', '.join(others)}")

    @asynccontextmanager
    async def _turn(self, machine: str) -> AsyncIterator[None]:
        """Waits until one more worker of a machine may load, and lets it load."""
        async with self._turn_over:
            await self._turn_over.wait_for(lambda: self._loading[machine] < self._may_load[machine])
            self._loading[machine] += 1
        try:
            yield
        finally:
            self._loading[machine] -= 1
            async with self._turn_over:
                self._turn_over.notify_all()

    def _replace(self, worker: Handle, reason: str) -> None:
        """Drops a worker and starts another one, if that is still allowed."""
        if self._restarts < self._settings.max_restarts:
            self._restarts += 1
            self._start_one()
        self._drop(worker, reason)

    def _drop(self, worker: Handle, reason: str) -> None:
        self._lost.append(reason)
        ray.kill(worker, no_restart=True)
        self._alive -= 1
        if self._alive == 0:
            self._free.put_nowait(None)


def _reason(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"took longer than rollout.worker_timeout_s={timeout_s:g}"
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return f"{type(cause).__name__}: {lines[0]}"
