"""Ways in from other libraries."""
