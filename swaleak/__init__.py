"""swaleak: a leak reproducer and fix validator for SGLang's sliding-window KV allocator."""

__version__ = "0.1.0"
