"""The exceptions and the version, which the core defines."""

from sok_keras import _native as native

CorruptDumpError = native.CorruptDumpError
DeviceError = native.DeviceError
DumpError = native.DumpError
DumpMismatchError = native.DumpMismatchError
RankError = native.RankError
SokError = native.SokError
TableFullError = native.TableFullError
TicketError = native.TicketError
UnknownChangesError = native.UnknownChangesError
UnwrappedOptimizerError = native.UnwrappedOptimizerError
VERSION = native.VERSION
