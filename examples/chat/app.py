"""A therapist of 1966 (after Weizenbaum's ELIZA), over a WebSocket: both sides may talk at any time."""

import asyncio
import re
from collections.abc import AsyncIterator

import servekit as sk

RULES = [
    (r"\bi need (.*)", "Why do you need {0}?"),
    (r"\bi am (.*)", "How long have you been {0}?"),
    (r"\bi feel (.*)", "Tell me more about feeling {0}."),
    (r"\bbecause\b", "Is that the real reason?"),
    (r"\b(mother|father|family)\b", "Tell me more about your {0}."),
    (r"\bhello\b", "Hello. What is on your mind?"),
    (r"\?$", "Why do you ask that?"),
]
MIRROR = {"i": "you", "my": "your", "am": "are", "me": "you", "your": "my", "you": "I"}


@sk.service
class Therapist:
    @sk.endpoint
    async def talk(
        self, messages: AsyncIterator[str], patience_s: float = 10.0
    ) -> AsyncIterator[str]:
        """Answer each message word by word; ask again when there is none for a while."""
        while True:
            try:
                message = await asyncio.wait_for(anext(messages), patience_s)
            except TimeoutError:
                yield "Please go on.\n"
                continue
            except StopAsyncIteration:
                yield "See you next week.\n"
                return
            for word in answer(message).split():
                yield f"{word} "
                await asyncio.sleep(0.02)
            yield "\n"


def answer(message: str) -> str:
    for pattern, reply in RULES:
        if found := re.search(pattern, message.strip().rstrip(".!").lower()):
            return reply.format(*(mirrored(group) for group in found.groups()))
    return "I see. Please tell me more."


def mirrored(text: str) -> str:
    return " ".join(MIRROR.get(word, word) for word in text.split())
