"""Measure the CPU time of rank 0's health monitor with simulated peers: python health.py <ranks> <seconds> [count]

The monitor is the real one; another process holds the other end of each connection and reports as the peers would.
With `count`, the messages of rank 0 are counted too, which costs time.
"""

import json
import os
import resource
import selectors
import socket
import sys
import threading
import time
from types import SimpleNamespace

from mlbert.distributed import health
from mlbert.distributed.channel import Channel
from mlbert.distributed.health import HealthMonitor, Stage

SETTLING_S = 6


def main(ranks: int, seconds: float, count: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * ranks)), hard))
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    peers = os.fork()
    if peers == 0:
        simulate(ranks, listener.getsockname()[1])
    world = SimpleNamespace(world_size=ranks, rank=0, host="host")
    monitor = HealthMonitor(world, lambda story, _: print(story), lambda: os._exit(3), health.HANG_SECONDS)
    monitor._channels = {rank: Channel(listener.accept()[0]) for rank in range(1, ranks)}
    monitor._hosts = ["host"] * ranks
    messages = count_messages() if count else {}
    monitor.mark(5, Stage.COMPUTE)
    thread = threading.Thread(target=monitor._watch_ranks, daemon=True)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident)
    time.sleep(SETTLING_S)
    cpu, begun, before, step = time.clock_gettime(clock), time.monotonic(), dict(messages), 5
    while time.monotonic() < begun + seconds:
        time.sleep(0.5)
        step += 1
        monitor.mark(step, Stage.COMPUTE)
    cpu, wall = time.clock_gettime(clock) - cpu, time.monotonic() - begun
    rates = {f"{name} per second": round((messages[name] - before[name]) / wall) for name in messages}
    print(json.dumps({"ranks": ranks, "share of a core": round(cpu / wall, 4), **rates}), flush=True)
    os.kill(peers, 9)
    os._exit(0)


def count_messages() -> dict[str, int]:
    counts = {"received": 0, "sent": 0}
    receive, send = Channel.receive, Channel.send

    def counted_receive(self):
        messages = receive(self)
        counts["received"] += len(messages or ())
        return messages

    def counted_send(self, **message):
        counts["sent"] += 1
        send(self, **message)

    Channel.receive, Channel.send = counted_receive, counted_send
    return counts


def simulate(ranks: int, port: int) -> None:
    channels = [Channel(socket.create_connection(("127.0.0.1", port))) for _ in range(1, ranks)]
    period = max(health.PERIOD_SECONDS, ranks / health.MOST_REPORTS_PER_SECOND)
    begun, reports = time.monotonic(), 0
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ, channel)
        while True:
            due = int((time.monotonic() - begun) / period * len(channels))
            for number in range(reports, due):
                place = (5 + number // len(channels), Stage.COMPUTE, number)
                channels[number % len(channels)].send(place=place)
            reports = due
            for key, _ in selector.select(0.05):
                key.data.receive()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), "count" in sys.argv[3:])
