"""The live page of the browser.

``snapshot_delta`` and ``flow`` are pure arithmetic on snapshots, ``history`` keeps the last hour,
``document`` declares and builds ``/live.json``, ``site`` holds the static files.
"""
