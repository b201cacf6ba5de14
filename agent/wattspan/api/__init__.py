"""Answers to "what was spent between then and then?", for programs that ask over HTTP.

:class:`wattspan.api.service.QueryService` is a handler for the web server; what it answers is
told in ``docs/reference/api.md``.
"""
