"""Networks that are served from the cache engine; importing one imports torch."""
