"""Archives of streams in a lake: tables that outlive the retention of their streams. Needs the extra ``lake``."""
