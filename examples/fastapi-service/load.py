"""Ask a service for its three pages, many clients at a time. Standard library only."""

from __future__ import annotations

import argparse
import http.client
import itertools
import threading
import time
import urllib.parse

PAGES = ("/thumbnail/{}", "/search?words=watt{}", "/wait?{}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("url")
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--seconds", type=float, default=20.0)
    chosen = options.parse_args()
    until = time.monotonic() + chosen.seconds
    counts = [0] * chosen.clients
    clients = [
        threading.Thread(target=ask, args=(chosen.url, number, until, counts))
        for number in range(chosen.clients)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    print(f"{sum(counts)} requests")


def ask(url: str, number: int, until: float, counts: list[int]) -> None:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=30)
    for turn in itertools.count(number):
        if time.monotonic() >= until:
            break
        connection.request("GET", PAGES[turn % len(PAGES)].format(turn))
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"{url} answered {answer.status}")
        counts[number] += 1
    connection.close()


if __name__ == "__main__":
    main()
