"""Interfaces of other libraries' mixed precision, for programs that come from them."""
