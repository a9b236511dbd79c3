"""Pages for people: the operator's `/admin`, rendered on the server."""
