"""A web service with three endpoints of very different cost. It knows nothing of tracing."""

from __future__ import annotations

import asyncio
import hashlib

from fastapi import FastAPI

app = FastAPI()


@app.get("/thumbnail/{number}")
def thumbnail(number: int) -> dict[str, str]:
    """Computes for some milliseconds, in a thread of the server's pool."""
    picture = number.to_bytes(8, "big") * 4096
    for _ in range(150):
        picture = hashlib.blake2b(picture, digest_size=32).digest() * 1024
    return {"digest": picture[:8].hex()}


@app.get("/search")
def search(words: str = "energy") -> dict[str, int]:
    """Computes a little."""
    return {"found": sum(hash((words, place)) % 7 == 0 for place in range(5000))}


@app.get("/wait")
async def wait() -> dict[str, str]:
    """Waits for somebody else, in the event loop."""
    await asyncio.sleep(0.1)
    return {"status": "done"}
