//! Imports point down, in all crates, and in the kernels' headers: never up, never in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms of the core from the top down. A room imports those below it.
const ROOMS: [&[&str]; 7] = [
    &["checkpoint", "host"],
    &["store", "contract"],
    &["formula", "exchange", "policy"],
    &["initializer", "pool"],
    &["math", "memory", "fork", "key", "fingerprint", "row_type"],
    &["simd"],
    &["error"],
];

/// By module, as a path: the modules that it names.
type Graph = BTreeMap<String, BTreeSet<String>>;

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, endings));
        } else if endings.iter().any(|ending| path.to_string_lossy().ends_with(ending)) {
            found.push(path);
        }
    }
    found
}

/// `host::table` of `host/table.rs`, `host` of `host/mod.rs`.
fn module_of(path: &Path, source: &Path) -> String {
    let path = path.strip_prefix(source).unwrap().with_extension("");
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let parts =
        if parts.last().is_some_and(|last| last == "mod") { &parts[..parts.len() - 1] } else { &parts };
    parts.join("::")
}

/// Paths of the program without comments and unit tests that begin with `crate::` or `super::`, those in braces one by one.
fn paths(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    // A name that a folder gives on is no import.
    let lines = text.lines().filter(|line| !line.starts_with("pub use self::"));
    let lines = lines.map(|line| line.split("//").next().unwrap());
    let text = lines.collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(start) {
            let rest = &text[at + start.len()..];
            let end =
                rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
            let prefix = format!("{start}{}", &rest[..end]);
            match rest[end..].strip_prefix('{').and_then(|list| list.split_once(['}', ';'])) {
                Some((list, _)) => {
                    let list = list.split(',').map(str::trim).filter(|one| !one.is_empty());
                    found.extend(list.map(|one| format!("{prefix}{one}")));
                }
                None => found.push(prefix),
            }
        }
    }
    found
}

/// The module that a path leads to: the longest part of it that is one.
fn resolve(path: &str, from: &str, is_folder: bool, modules: &BTreeSet<String>) -> Option<String> {
    let mut base: Vec<&str> = from.split("::").filter(|part| !part.is_empty()).collect();
    let path = match path.split_once("::")? {
        ("crate", rest) => {
            base.clear();
            rest
        }
        ("super", rest) => {
            base.pop();
            rest
        }
        (_, rest) if is_folder => rest,
        _ => return None,
    };
    base.extend(path.split("::").filter(|part| !part.is_empty()));
    (1..=base.len()).rev().map(|len| base[..len].join("::")).find(|module| modules.contains(module))
}

fn graph_of(source: &Path) -> Graph {
    let files = files(source, &[".rs"]);
    let modules: BTreeSet<String> = files.iter().map(|file| module_of(file, source)).collect();
    let mut graph = Graph::new();
    for file in &files {
        let (module, is_folder) = (module_of(file, source), file.ends_with("mod.rs"));
        if module == "lib" {
            continue;
        }
        let text = fs::read_to_string(file).unwrap();
        let named = paths(&text).into_iter().filter_map(|path| resolve(&path, &module, is_folder, &modules));
        graph.insert(module.clone(), named.filter(|other| *other != module).collect());
    }
    graph
}

/// A circle, if there is one.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    fn visit(
        module: &str,
        graph: &Graph,
        path: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|one| one == module) {
            return Some(path[start..].to_vec());
        }
        if !done.insert(module.to_string()) {
            return None;
        }
        path.push(module.to_string());
        let found = graph.get(module).into_iter().flatten().find_map(|next| visit(next, graph, path, done));
        path.pop();
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(module, graph, &mut Vec::new(), &mut done))
}

#[test]
fn no_module_imports_itself_through_others() {
    for name in ["core", "cuda", "python"] {
        let graph = graph_of(&crates().join(name).join("src"));
        assert!(graph.len() > 10, "{name}: {} modules", graph.len());
        assert_eq!(circle(&graph), None, "{name}");
    }
}

#[test]
fn rooms_of_the_core_import_lower_ones() {
    let level = |module: &str| {
        let room = module.split("::").next().unwrap();
        ROOMS.iter().position(|rooms| rooms.contains(&room)).unwrap_or_else(|| panic!("{room} has no level"))
    };
    let room = |module: &str| module.split("::").next().unwrap().to_string();
    for (module, imports) in graph_of(&crates().join("core/src")) {
        for import in imports {
            let is_own = room(&module) == room(&import);
            assert!(is_own || level(&module) < level(&import), "{module} imports {import}");
        }
    }
}

#[test]
fn headers_of_kernels_include_lower_ones() {
    let folder = crates().join("cuda/kernels");
    let mut graph = Graph::new();
    for file in files(&folder, &[".cu", ".cuh"]) {
        let text = fs::read_to_string(&file).unwrap();
        let includes = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        graph.insert(name, includes.map(str::to_string).collect());
    }
    assert!(graph.values().flatten().all(|header| header.ends_with(".cuh")), "kernels include headers alone");
    assert_eq!(circle(&graph), None);
}

#[test]
fn a_circle_would_be_found() {
    let graph = |edges: &[(&str, &str)]| -> Graph {
        let mut graph = Graph::new();
        edges.iter().for_each(|(from, to)| {
            graph.entry(from.to_string()).or_default().insert(to.to_string());
        });
        graph
    };
    assert_eq!(circle(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(circle(&graph(&[("a", "b"), ("b", "c"), ("c", "b")])).unwrap(), ["b", "c"]);
    let modules = BTreeSet::from(["host".to_string(), "host::table".to_string()]);
    let text = "use crate::host::{\n    table::HostTable,\n    other,\n};\n// use crate::no;\n";
    let named: Vec<_> = paths(text).iter().filter_map(|path| resolve(path, "x", false, &modules)).collect();
    assert_eq!(named, ["host::table", "host"]);
}
