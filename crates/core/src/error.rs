//! Everything that can be wrong, each with the values that were wrong. The text says the rule, then what came.

use std::path::PathBuf;
use std::sync::Arc;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that the caller chose: becomes `ValueError` in Python.
    #[error("{0}")]
    Argument(String),

    #[error(
        "table `{table}` is full: no room for {refused} of the new keys, it holds {len} of at most {capacity} rows. \
         Raise `max_capacity`, or set `check_mode=\"warn\"` or \"count\" to go on without them"
    )]
    TableFull { table: String, refused: u64, len: u64, capacity: u64 },

    #[error(
        "id {id}{} is outside table `{table}`, whose ids are 0 to {last} (`vocabulary_size={}`). \
         Set `out_of_vocabulary=\"zeros\"` to answer such ids with zeros, or leave `vocabulary_size` away for a dynamic table",
        feature.as_ref().map(|name| format!(" of feature `{name}`")).unwrap_or_default(), last + 1
    )]
    /// `feature`: none in a call of the table itself, and where a GPU found it, in an earlier call.
    OutOfVocabulary { table: String, feature: Option<String>, id: i64, last: u64 },

    #[error(
        "the tables {tables} were trained a second time, but no optimizer has updated them: the gradients would pile up and \
         no row would move. Compile with `sok_keras.OptimizerWrapper(optimizer)`"
    )]
    UnwrappedOptimizer { tables: String },

    #[error("ticket of {tables}: {what}")]
    Ticket { tables: String, what: String },

    /// A call for something that is no more, or not yet: becomes `SokError`.
    #[error("{0}")]
    State(String),

    #[error("{path}: {what}")]
    CorruptDump { path: PathBuf, what: String },

    #[error("{path}: {what}")]
    DumpMismatch { path: PathBuf, what: String },

    #[error(
        "{path}: a new dump took this one's files away while it was read, and so did those after it. Load again while fewer dumps \
         are written there"
    )]
    DumpReplaced { path: PathBuf },

    #[error("{path}: {source}")]
    Io { path: PathBuf, source: Arc<std::io::Error> },

    /// No GPU, none that may be used, or what it needs is not there.
    #[error("{0}")]
    Device(String),

    /// A panic, caught where Python or a framework called.
    #[error("this is a bug in sok_keras, please report it: {0}")]
    Bug(String),

    #[error("cannot get {bytes} bytes of memory for {what}: {source}")]
    Memory { bytes: usize, what: &'static str, source: Arc<std::io::Error> },
}

impl Error {
    pub fn argument(message: impl Into<String>) -> Error {
        Error::Argument(message.into())
    }

    /// `what` may quote a hostile file, so a long text is cut.
    pub fn corrupt_dump(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::CorruptDump { path: path.into(), what: clipped(what.into()) }
    }

    /// As [`Error::corrupt_dump`].
    pub fn dump_mismatch(path: impl Into<PathBuf>, what: impl Into<String>) -> Error {
        Error::DumpMismatch { path: path.into(), what: clipped(what.into()) }
    }

    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Error {
        Error::Io { path: path.into(), source: Arc::new(source) }
    }

    pub fn memory(bytes: usize, what: &'static str, source: std::io::Error) -> Error {
        Error::Memory { bytes, what, source: Arc::new(source) }
    }
}

/// Bytes of a message that quotes a file.
const LONGEST: usize = 2000;

fn clipped(mut text: String) -> String {
    if text.len() > LONGEST {
        text.truncate(text.floor_char_boundary(LONGEST));
        text.push_str(" ...");
    }
    text
}
