"""A local server that answers the chat and embeddings API of OpenAI with fixed token counts."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

USAGE = {
    "prompt_tokens": 1200,
    "completion_tokens": 80,
    "total_tokens": 1280,
    "prompt_tokens_details": {"cached_tokens": 1000},
}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = _embedding(body) if self.path.endswith("embeddings") else _chat(body)
        stream = bool(body.get("stream"))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.end_headers()
        self.wfile.write(_events(answer) if stream else json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    wants_tool = body.get("tools") and body["messages"][-1]["role"] != "tool"
    call = (
        {
            "id": "call-1",
            "type": "function",
            "function": {"name": body["tools"][0]["function"]["name"], "arguments": "{}"},
        }
        if wants_tool
        else None
    )
    message: dict[str, Any] = {"role": "assistant", "content": None if call else "done"}
    if call:
        message["tool_calls"] = [call]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
        ],
        "usage": USAGE,
    }


def _embedding(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": "list",
        "model": body["model"],
        "data": [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}],
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def _events(answer: dict[str, Any]) -> bytes:
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    choice = answer["choices"][0]
    delta = {**choice["message"]}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": answer["usage"]},
    ]
    lines = [f"data: {json.dumps(each)}\n\n" for each in chunks] + ["data: [DONE]\n\n"]
    return "".join(lines).encode()


def serve() -> str:
    """Start the server in a thread; returns its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


if __name__ == "__main__":
    import sys

    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler)
    server.serve_forever()
