"""A job of MPI processes: job.py train|shuffle SECONDS. The first one says what came out, as JSON.

train: data-parallel training. Each process has the weights of two layers and examples of its own;
in each step gradients are added up over all processes (8 MiB).
shuffle: each process sends each other one its share of 8 MiB of records, by the records' keys."""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

WIDTH, BATCH = 1024, 32
RECORDS = 1 << 20  # 64 bits each

comm = MPI.COMM_WORLD
random = np.random.default_rng(comm.rank)
in_mpi = 0.0  # seconds


def timed(call, *arguments):
    """Calls MPI, and counts how long that takes: moving bytes, and waiting for the other process."""
    global in_mpi
    start = time.monotonic()
    result = call(*arguments)
    in_mpi += time.monotonic() - start
    return result


class Training:
    def __init__(self):
        same = np.random.default_rng(7)
        self.layers = same.standard_normal((2, WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5)
        self.gradients = np.empty_like(self.layers)
        self.sums = np.empty_like(self.layers)
        self.examples = random.standard_normal((BATCH, WIDTH), dtype=np.float32)
        self.wanted = random.standard_normal((BATCH, WIDTH), dtype=np.float32)
        self.bytes = self.layers.nbytes

    def step(self):
        hidden = np.maximum(self.examples @ self.layers[0], 0)
        error = hidden @ self.layers[1] - self.wanted
        np.matmul(hidden.T, error, out=self.gradients[1])
        np.matmul(self.examples.T, (error @ self.layers[1].T) * (hidden > 0), out=self.gradients[0])
        timed(comm.Allreduce, self.gradients, self.sums)
        self.layers -= self.sums * np.float32(1e-6 / comm.size)

    def check(self):
        """All processes have the same weights, and they have changed."""
        mine = float(np.abs(self.layers).sum(dtype=np.float64))
        return len(set(comm.allgather(mine))) == 1 and bool(np.any(self.sums))


class Shuffle:
    def __init__(self):
        self.records = random.integers(0, 1 << 63, RECORDS, dtype=np.int64)
        self.room = np.empty(2 * RECORDS, dtype=np.int64)
        self.bytes = self.records.nbytes
        self.good = True

    def step(self):
        owner = self.records % comm.size
        counts = np.bincount(owner, minlength=comm.size)
        ordered = self.records[np.argsort(owner, kind="stable")]
        incoming = np.array(timed(comm.alltoall, counts.tolist()))
        got = self.room[: incoming.sum()]
        timed(comm.Alltoallv, (ordered, counts), (got, incoming))
        self.good &= bool(np.all(got % comm.size == comm.rank))
        self.total = int(got.size)

    def check(self):
        """Each record is with who owns it, and none is missing."""
        return all(comm.allgather(self.good)) and comm.allreduce(self.total) == RECORDS * comm.size


def main():
    job = {"train": Training, "shuffle": Shuffle}[sys.argv[1]]()
    job.step()  # connections are made, memory is registered
    comm.Barrier()
    start = time.monotonic()
    job.step()
    one = comm.allreduce(time.monotonic() - start, op=MPI.MAX)
    steps = max(1, round(float(sys.argv[2]) / one))
    comm.Barrier()
    start, before = time.monotonic(), in_mpi
    for _ in range(steps):
        job.step()
    timed(comm.Barrier)
    elapsed = time.monotonic() - start
    moving = comm.allreduce(in_mpi - before) / comm.size
    good = job.check()
    if comm.rank == 0:
        print(json.dumps({"steps": steps, "elapsed_s": elapsed, "mpi_s": moving, "bytes": job.bytes, "good": good}))


main()
