"""Types of options, of which the stub beside this file tells type checkers and editors more.

At run time a name is a `str` here: packages of users add names (`fsdpx.core.base.extensions`), and the call that looks
one up knows them all and says more about an unknown one."""

from typing import Any

Backend = CodecName = Device = DtypeName = PrecisionName = ScheduleName = SequenceMode = Strategy = WeightsChoice = str
ForeignModule = RuntimeArgs = GenerateArgs = Any
