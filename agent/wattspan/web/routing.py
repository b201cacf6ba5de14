"""Which handler answers which path and method, and what others are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wattspan.web.message import Handler, Request, Response


def routes(table: Mapping[str, Mapping[str, Handler]]) -> Handler:
    """A handler of many: ``{path: {method: handler}}``. HEAD is answered where GET is."""

    async def answer(request: Request) -> Response:
        methods = table.get(request.path)
        if methods is None:
            return Response(404, f"There is nothing here, only at {', '.join(table)}.\n".encode())
        wanted = "GET" if request.method == "HEAD" and "HEAD" not in methods else request.method
        handler = methods.get(wanted)
        if handler is None:
            return not_allowed(methods)
        return await handler(request)

    return answer


def not_allowed(methods: Iterable[str]) -> Response:
    known = ", ".join(methods)
    return Response(405, f"Only {known} is understood here.\n".encode(), headers={"Allow": known})
