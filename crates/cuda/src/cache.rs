//! Compiled kernels on disk, so that a machine compiles them once.
//!
//! A file is named by a hash of all that its bytes depend on, and appears whole, by a rename. What cannot be read or written is
//! compiled again: the cache is no part of what is correct.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use sok_core::error::Result;
use xxhash_rust::xxh3::Xxh3;

use crate::nvrtc::{Cubin, Nvrtc, Source};

/// Kernels of a source, from the cache or compiled now.
pub fn compile(nvrtc: &Nvrtc, source: &Source, arch: u32, names: &[String]) -> Result<Cubin> {
    let path =
        folder().map(|folder| folder.join(format!("{:032x}.cubin", fingerprint(nvrtc, source, arch, names))));
    if let Some(cubin) = path.as_ref().and_then(|path| read(path, names.len())) {
        return Ok(cubin);
    }
    log::info!("compiling {} for sm_{arch}, once on this machine: {}", source.name, names.join(", "));
    let cubin = nvrtc.compile(source, arch, names)?;
    if let Some(path) = path
        && let Err(error) = write(&path, &cubin)
    {
        log::warn!("compiled kernels cannot be kept in {}: {error}", path.display());
    }
    Ok(cubin)
}

/// `SOK_CACHE`, else the user's cache folder; none without a home.
fn folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("SOK_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("sok_keras")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/sok_keras")))
}

fn fingerprint(nvrtc: &Nvrtc, source: &Source, arch: u32, names: &[String]) -> u128 {
    let mut hash = Xxh3::new();
    let mut add = |text: &str| {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    add(env!("CARGO_PKG_VERSION"));
    add(&format!("{:?} sm_{arch}", nvrtc.version));
    add(source.text);
    source.headers.iter().for_each(|(_, text)| add(text));
    names.iter().for_each(|name| add(name));
    hash.digest128()
}

/// A file: the symbols, a line each, an empty line, the code.
fn read(path: &PathBuf, num_symbols: usize) -> Option<Cubin> {
    let bytes = fs::read(path).ok()?;
    let end = bytes.windows(2).position(|pair| pair == b"\n\n")?;
    let symbols: Vec<String> = std::str::from_utf8(&bytes[..end]).ok()?.lines().map(String::from).collect();
    let code = bytes[end + 2..].to_vec();
    (symbols.len() == num_symbols && code.starts_with(b"\x7fELF")).then_some(Cubin { code, symbols })
}

fn write(path: &PathBuf, cubin: &Cubin) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut file = fs::File::create(&unfinished)?;
    file.write_all(cubin.symbols.join("\n").as_bytes())?;
    file.write_all(b"\n\n")?;
    file.write_all(&cubin.code)?;
    fs::rename(unfinished, path)
}
