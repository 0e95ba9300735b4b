"""Archives of streams in a lake: tables that outlive the retention of their streams. Needs the extra ``lake``."""

from jetspark.lake import _extra as _extra

__all__: list[str] = []
