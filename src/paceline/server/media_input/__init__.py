"""Images of HTTP requests: read from the parts of every API, and fetched where that is allowed. Nothing is decoded here."""
