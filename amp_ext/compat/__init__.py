"""Support programs that were written for the mixed precision of other libraries."""
