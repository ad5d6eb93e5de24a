"""Rewards behind HTTP: the client, the format of a request, and the server."""
