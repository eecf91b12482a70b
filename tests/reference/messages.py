"""What the library logs, where a test looks for it: the one place to change with a message."""

from __future__ import annotations

# an eviction, or a selection, that was given up
KEEPS_FULL = "goes on with its full cache"
KEEPS_SELECTION = "goes on with the kept set of its last selection"
# entries that the host moves in a device's place, or in the larger buffers
BY_HOST = "by way of the host"
IN_OLD_BUFFERS = "in the old ones"
NO_MEMORY_FOR_LAYER = "no memory for a layer's rows"
GATHERED = r"rows of (\d+) of (\d+) layers gathered on a device"
# no room for more cells
MISSING = r"(\d+\.\d) MiB are missing"
ABOVE_LIMIT = "above the limit"
LOST = "a device failed, the sequence was cleared"
# calls that an evicted sequence refuses
NOT_COPIED = "copied"
NOT_SHIFTED = "shifted"
