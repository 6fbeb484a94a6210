//! How a file of a dump is opened: somebody else may have put anything under its name.

use std::fs::{self, File, FileType, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Error, Result};

/// A file of a dump, open for reading. What is no regular file is neither followed nor waited for.
///
/// # Errors
/// [`Error::CorruptDump`] that says what it is instead; [`Error::Io`].
pub(super) fn open_regular(path: &Path) -> Result<File> {
    let io = |e| Error::io(path, e);
    // Opening some devices does something, so the name is looked at first.
    check_regular(path, fs::symlink_metadata(path).map_err(io)?.file_type())?;
    // The name may have become another file's since: again no link is followed, and no writer of a FIFO waited for.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(io)?;
    check_regular(path, file.metadata().map_err(io)?.file_type())?;
    Ok(file)
}

fn check_regular(path: &Path, kind: FileType) -> Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let got = match () {
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(Error::corrupt_dump(path, format!("a file of a dump must be a regular file: got {got}")))
}
