//! The errors of this crate. Each has the values that were wrong. Its text states the rule, then the value that was received.

use std::path::PathBuf;
use std::sync::Arc;

/// A result with an error of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate, with the values that were wrong.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value of the caller is wrong. It becomes a `ValueError` in Python.
    #[error("{0}")]
    Argument(String),

    /// A batch has more new keys than the table may hold.
    #[error(
        "table `{table}` is full: no room for {refused} of the new keys, it holds {len} of at most {capacity} rows. \
         Raise `max_capacity`, or set `check_mode=\"warn\"` or \"count\" to go on without them. Under an eviction policy the rows of the batch \
         and of steps in progress stay"
    )]
    TableFull {
        /// Name of the table.
        table: String,
        /// Number of new keys without room.
        refused: u64,
        /// Number of rows.
        len: u64,
        /// Maximal number of rows.
        capacity: u64,
    },

    /// An id is outside of a static vocabulary.
    #[error(
        "id {id}{} is outside table `{table}`, whose ids are 0 to {last} (`vocabulary_size={}`). \
         Set `out_of_vocabulary=\"zeros\"` to answer such ids with zeros, or leave `vocabulary_size` away for a dynamic table",
        feature.as_ref().map(|name| format!(" of feature `{name}`")).unwrap_or_default(), last + 1
    )]
    OutOfVocabulary {
        /// Name of the table.
        table: String,
        /// Name of the feature. `None` in a call of the table itself, and if a GPU found the id in an earlier call.
        feature: Option<String>,
        /// The id.
        id: i64,
        /// The largest id of the vocabulary.
        last: u64,
    },

    /// Gradients were pushed a second time, and no optimizer is bound.
    #[error(
        "the tables {tables} were trained a second time, but no optimizer has updated them: the gradients would pile up and \
         no row would move. Compile with `sok_keras.OptimizerWrapper(optimizer)`"
    )]
    UnwrappedOptimizer {
        /// Names of the tables.
        tables: String,
    },

    /// A ticket, or a gradient, names a push or a lookup that does not exist.
    #[error("ticket of {tables}: {what}")]
    Ticket {
        /// Names of the tables.
        tables: String,
        /// What is wrong.
        what: String,
    },

    /// What the call needs no longer exists, or does not exist yet. It becomes a `SokError` in Python.
    #[error("{0}")]
    State(String),

    /// A dump differs from what was written.
    #[error("{path}: {what}")]
    CorruptDump {
        /// The dump, or a file of it.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },

    /// A dump is whole, but does not fit the tables.
    #[error("{path}: {what}")]
    DumpMismatch {
        /// The dump.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },

    /// A table has no record of what has changed since a dump.
    #[error(
        "table `{table}` has no record of its changes since that dump. The dump is not from this process, the table was cleared or got \
         other optimizer states, or 16 newer dumps were made. Write a whole dump by `dump`"
    )]
    UnknownChanges {
        /// Name of the table.
        table: String,
    },

    /// New dumps have removed the files of the one that was read.
    #[error(
        "{path}: a new dump took this one's files away while it was read, and so did those after it. Load again while fewer dumps \
         are written there"
    )]
    DumpReplaced {
        /// The dump.
        path: PathBuf,
    },

    /// The operating system refused an operation on a file.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: Arc<std::io::Error>,
    },

    /// There is no GPU that can be used, something that it needs is missing, or tensors and tables are in different memory.
    #[error("{0}")]
    Device(String),

    /// Another rank has failed in a call that all ranks make, or cannot be reached.
    #[error("rank {rank} {what}")]
    Rank {
        /// The other rank.
        rank: usize,
        /// What it did or did not do.
        what: String,
    },

    /// A panic that was caught in a call of Python or of a framework. It is a bug of this library.
    #[error("this is a bug in sok_keras, please report it: {0}")]
    Bug(String),

    /// The system has no memory for an allocation.
    #[error("cannot get {bytes} bytes of memory for {what}: {source}")]
    Memory {
        /// Size of the allocation in bytes.
        bytes: usize,
        /// What the memory is for.
        what: &'static str,
        /// The error of the operating system.
        source: Arc<std::io::Error>,
    },
}

impl Error {
    /// Makes an [`Error::Argument`] with this text.
    pub fn argument(message: impl Into<String>) -> Error {
        Error::Argument(message.into())
    }

    /// Makes an [`Error::CorruptDump`]. `what` may quote a hostile file, so a text of more than 2000 bytes is cut.
    pub fn corrupt_dump(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::CorruptDump { path: path.into(), what: clipped(what.into()) }
    }

    /// Makes an [`Error::DumpMismatch`]. A text of more than 2000 bytes is cut.
    pub fn dump_mismatch(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::DumpMismatch { path: path.into(), what: clipped(what.into()) }
    }

    /// Makes an [`Error::Io`].
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Error {
        Error::Io { path: path.into(), source: Arc::new(source) }
    }

    /// Makes an [`Error::Memory`]. `what` says what the memory is for.
    pub fn memory(bytes: usize, what: &'static str, source: std::io::Error) -> Error {
        Error::Memory { bytes, what, source: Arc::new(source) }
    }
}

/// Maximal number of bytes of a text that may quote a file.
const LONGEST: usize = 2000;

fn clipped(mut text: String) -> String {
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push_str(" ...");
    }
    text
}
