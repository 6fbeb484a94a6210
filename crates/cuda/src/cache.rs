//! Compiled kernels on disk, so that a machine compiles them once.
//!
//! The name of a file is a hash of everything that its bytes depend on. A file is written under another name and then renamed, so
//! it is never incomplete. It begins with a checksum. Because its code runs on the user's GPU, a file is used only if file and
//! folder belong to the user and nobody else may write to them. If a file cannot be read, trusted or written, its kernels are
//! compiled again: results never depend on the cache.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use sok_core::error::Result;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::nvrtc::{Cubin, Nvrtc, Source};

/// Maximum size of a file in bytes. No source compiles to a tenth of it.
const MAX_BYTES: u64 = 1 << 28;
/// Seconds that a compilation takes at least to be logged as a warning, which Python shows by default.
const LONG_SECONDS: f64 = 2.0;
/// Length of the first line: the hexadecimal digits of the checksum, and the line feed.
const HEAD: usize = 33;

/// Compiled kernels, and whether they were read from the cache.
pub struct Compiled {
    pub cubin: Cubin,
    pub is_cached: bool,
}

/// Returns kernels of a source, from the cache or compiled now. `anew`: compiles them in any case, and replaces the file in the
/// cache.
pub fn compile(nvrtc: &Nvrtc, source: &Source, arch: u32, names: &[String], anew: bool) -> Result<Compiled> {
    let path =
        folder().map(|folder| folder.join(format!("{:032x}.cubin", fingerprint(nvrtc, source, arch, names))));
    let kept = path.as_ref().filter(|_| !anew).and_then(|path| read(path, names.len()));
    if let Some(cubin) = kept {
        return Ok(Compiled { cubin, is_cached: true });
    }
    log::info!("compiling {} for sm_{arch}, once on this machine: {}", source.name, names.join(", "));
    let start = Instant::now();
    let cubin = nvrtc.compile(source, arch, names)?;
    let seconds = start.elapsed().as_secs_f64();
    if seconds > LONG_SECONDS {
        let kept = path.as_ref().map_or("nowhere: set `SOK_CACHE`".into(), |path| path.display().to_string());
        log::warn!(
            "compiled GPU kernels of {} in {seconds:.1} s, once on this machine; kept in {kept}",
            source.name
        );
    }
    if let Some(path) = path
        && let Err(error) = write(&path, &cubin)
    {
        log::warn!("compiled kernels cannot be kept in {}: {error}", path.display());
    }
    Ok(Compiled { cubin, is_cached: false })
}

/// Returns `SOK_CACHE`, or the cache folder of the user, or `None` if the user has no home folder.
fn folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("SOK_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("sok_keras")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/sok_keras")))
}

/// Returns a hash of everything that the compiled code depends on.
fn fingerprint(nvrtc: &Nvrtc, source: &Source, arch: u32, names: &[String]) -> u128 {
    let mut hash = Xxh3::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&format!("{:?} sm_{arch}", nvrtc.version));
    add(source.text);
    (source.headers)().iter().for_each(|(_, text)| add(text));
    names.iter().for_each(|name| add(name));
    hash.digest128()
}

/// Returns whether a file or folder belongs to the user and nobody else may write to it.
#[allow(unsafe_code)]
fn is_trusted(metadata: &fs::Metadata) -> bool {
    // SAFETY: The call has no preconditions; it only returns an id of the process.
    let user = unsafe { libc::geteuid() };
    metadata.uid() == user && metadata.mode() & 0o022 == 0
}

fn is_trusted_folder(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.is_dir() && is_trusted(&metadata))
}

/// Reads a file. Returns `None` if it cannot be trusted or is not complete. It contains the checksum of everything after it, the
/// symbols (one per line), an empty line, and the code.
fn read(path: &Path, num_symbols: usize) -> Option<Cubin> {
    if !is_trusted_folder(path.parent()?) {
        return None;
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || !is_trusted(&metadata) || metadata.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    let (head, body) = bytes.split_at_checked(HEAD)?;
    if head != checksum_line(body).as_bytes() {
        return None;
    }
    let end = body.windows(2).position(|pair| pair == b"\n\n")?;
    let symbols: Vec<String> = std::str::from_utf8(&body[..end]).ok()?.lines().map(String::from).collect();
    let code = body[end + 2..].to_vec();
    (symbols.len() == num_symbols && code.starts_with(b"\x7fELF")).then_some(Cubin { code, symbols })
}

fn checksum_line(body: &[u8]) -> String {
    format!("{:032x}\n", xxh3_128(body))
}

fn write(path: &Path, cubin: &Cubin) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if !is_trusted_folder(folder) {
        return Err(io::Error::other("the folder must be the user's, and nobody else may write to it"));
    }
    // The name is random, so nobody can have created a file of this name before.
    let unfinished = path.with_extension(format!("{:016x}.tmp", RandomState::new().hash_one(path)));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let written = write_file(file, cubin).and_then(|()| fs::rename(&unfinished, path));
    written.inspect_err(|_| drop(fs::remove_file(&unfinished)))
}

fn write_file(mut file: File, cubin: &Cubin) -> io::Result<()> {
    let body = [cubin.symbols.join("\n").as_bytes(), b"\n\n", &cubin.code].concat();
    file.write_all(checksum_line(&body).as_bytes())?;
    file.write_all(&body)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn cubin() -> Cubin {
        Cubin { code: b"\x7fELF and so on".to_vec(), symbols: vec!["a".into(), "b".into()] }
    }

    /// Writes a file to a new folder and returns its path.
    fn kept() -> PathBuf {
        let name = format!("sok-cache-{:016x}", RandomState::new().hash_one(0));
        let path = std::env::temp_dir().join(name).join("kernels.cubin");
        write(&path, &cubin()).unwrap();
        path
    }

    fn is_taken(path: &Path) -> bool {
        let found = read(path, 2);
        assert!(found.as_ref().is_none_or(|f| f.code == cubin().code && f.symbols == cubin().symbols));
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        found.is_some()
    }

    #[test]
    fn what_was_written_is_taken_and_nothing_else_is_left_behind() {
        let path = kept();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        write(&path, &cubin()).unwrap();
        assert!(is_taken(&path));
    }

    #[test]
    fn a_byte_that_changed_or_is_missing_is_found() {
        let whole = fs::read(kept()).unwrap();
        for at in 0..whole.len() {
            let path = kept();
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            fs::write(&path, &bytes).unwrap();
            assert!(!is_taken(&path), "byte {at}");
            let path = kept();
            fs::write(&path, &whole[..at]).unwrap();
            assert!(!is_taken(&path), "{at} bytes");
        }
    }

    #[test]
    fn what_others_may_write_to_is_not_taken() {
        let path = kept();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
        assert!(!is_taken(&path));
        let path = kept();
        fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(write(&path, &cubin()).is_err());
        assert!(!is_taken(&path));
    }

    #[test]
    fn what_belongs_to_others_is_not_taken() {
        let path = kept();
        // Only the superuser may give a file away.
        if chown(&path, Some(12345), None).is_ok() {
            assert!(!is_taken(&path));
        }
    }

    #[test]
    fn links_and_other_kinds_of_files_are_not_taken() {
        let path = kept();
        let link = path.with_file_name("link.cubin");
        symlink(&path, &link).unwrap();
        assert!(read(&link, 2).is_none());
        assert!(is_taken(&path));
        let path = kept();
        fs::remove_file(&path).unwrap();
        assert!(
            std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success()
        );
        assert!(!is_taken(&path), "a pipe, which nobody writes to");
    }
}
