"""Import path for plugins: tables of settings (defined in ``wattspan.model.settings``)."""

from wattspan.model.settings import Table, about

__all__ = ["Table", "about"]
