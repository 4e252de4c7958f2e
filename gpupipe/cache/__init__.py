"""Copies of remote objects on a local disk, shared by all processes of a machine."""

from gpupipe.cache.folder import Cache as Cache
