"""One HTML page, or one JSON document, that shows where the memory of a step goes."""
