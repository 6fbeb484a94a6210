"""The exceptions, which the core defines."""

from sok_keras.backend import native

CorruptDumpError = native.CorruptDumpError
DeviceError = native.DeviceError
DumpError = native.DumpError
DumpMismatchError = native.DumpMismatchError
SokError = native.SokError
TableFullError = native.TableFullError
TicketError = native.TicketError
UnwrappedOptimizerError = native.UnwrappedOptimizerError
