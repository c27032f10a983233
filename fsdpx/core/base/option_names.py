"""Types of options. The stub next to this file declares their values for type checkers and editors.

At run time each type is `str`: packages of users can add names (`fsdpx.core.base.extensions`), and the call that looks
a name up knows all of them and reports an unknown one better.
"""

from typing import Any

Backend = CodecName = Device = DtypeName = PrecisionName = ScheduleName = SequenceMode = Strategy = WeightsChoice = str
ForeignModule = RuntimeArgs = GenerateArgs = Any
