"""A service and its client: requests, replies, and the error when no service is running."""

import asyncio

import jetspark
from jetspark.server import NatsServer


async def main() -> None:
    async with NatsServer() as server, jetspark.connect(server.url) as nc:
        try:
            await nc.request("price", b"apples")
        except jetspark.NoResponders as error:
            print(error)

        async def price(question: jetspark.Message) -> None:
            await question.respond(b"%d cents" % (10 * len(question.data)))

        # Three members of one queue group: each request goes to one of them.
        for _ in range(3):
            await nc.subscribe("price", queue="pricing", callback=price)
        questions = [b"apples", b"pears", b"plums"]
        answers = await asyncio.gather(*(nc.request("price", question) for question in questions))
        for question, answer in zip(questions, answers, strict=True):
            print(question.decode(), answer.data.decode())


asyncio.run(main())
