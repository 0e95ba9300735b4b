"""A worker that runs until it is asked to stop, then finishes its present job and leaves the rest to others.

Run it as often as you like: workers that share a durable consumer share its messages. Without ``--servers`` it starts a
server of its own, fills it with jobs and asks itself to stop when they are done.
"""

import argparse
import asyncio
import contextlib
import os
import signal

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.server import NatsServer

JOBS = 1_000


async def work(servers: str) -> int:
    """Process jobs until SIGTERM or Ctrl-C; returns how many were done."""
    done = 0
    async with jetspark.connect(servers, name="worker") as nc:
        js = nc.jetstream()
        stream = await js.stream("JOBS")  # raises StreamNotFound: its owner makes the stream, not its readers
        consumer = await stream.consumer("workers")
        async with consumer.messages(max_messages=100) as messages:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                # Closing ends the loop below after the present job, and returns the jobs fetched ahead.
                loop.add_signal_handler(number, lambda: loop.create_task(messages.close()))
            async for message in messages:
                try:
                    await process(message.data)
                except ValueError as error:
                    await message.term(reason=str(error))  # a final error: no more deliveries
                except OSError:
                    await message.nak(delay=5.0)  # another worker may succeed
                else:
                    await message.ack()
                    done += 1
    return done


async def process(job: bytes) -> None:
    if job == b"%d" % (JOBS - 1):  # the last one: a process manager would do this
        os.kill(os.getpid(), signal.SIGTERM)
    if not job.isdigit():
        raise ValueError(f"not a job: {job!r}")


async def set_up(servers: str) -> None:
    """The setup by the owner of the stream, done once."""
    async with jetspark.connect(servers) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="JOBS", subjects=["jobs.>"], retention="workqueue"))
        await stream.create_consumer(ConsumerConfig(durable_name="workers", ack_wait_s=30, max_deliver=10))
        for number in range(JOBS):
            await js.publish_async("jobs.new", b"%d" % number)
        await js.publish_async_complete()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", help="where NATS is; its stream JOBS has a consumer 'workers'")
    servers = parser.parse_args().servers
    async with contextlib.AsyncExitStack() as stack:
        if servers is None:
            servers = (await stack.enter_async_context(NatsServer())).url
            await set_up(servers)
        print(f"{await work(servers)} jobs done, stopped in order")


if __name__ == "__main__":
    asyncio.run(main())
