"""Values as objects in a store, and back, without pickle: tables, tensors, documents, bytes.

Importing this package loads none of torch, numpy, pandas and pyarrow: a value whose type comes from one of them can
only exist where it is loaded already.
"""

from dagster_resilient.codecs.codec import HEAD_ROWS, Codec, Encoded, Summary, part
from dagster_resilient.codecs.registry import decode, encode, register_codec, unregister_codec

__all__ = ["HEAD_ROWS", "Codec", "Encoded", "Summary", "decode", "encode", "part", "register_codec", "unregister_codec"]
