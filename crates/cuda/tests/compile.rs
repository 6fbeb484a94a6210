//! Every kernel compiles for each generation of devices; needs NVRTC, no GPU.

use sok_core::formula::Rule;
use sok_cuda::kernels::{
    ADMISSION, AT_OWNER, BACKWARD, CHANGES, CONTROL, EXPIRY, FORWARD, GENERAL, GIVEN, KEYS, MISSED, RANKS,
    SCORES, SORT, SWEEP, TABLE, WEIGHTS,
};
use sok_cuda::nvrtc::{Cubin, Nvrtc, Source};
use sok_cuda::rule::type_name;

const DIMS: [usize; 9] = [1, 3, 8, 17, 64, 100, 128, 257, 1024];
/// Codes of rows of 16 bits, as `RowKind::code` makes them: float16, bfloat16, and both with rounding by chance.
const NARROW: [usize; 4] = [17 | 1 << 24, 64 | 2 << 24, 100 | 5 << 24, 257 | 6 << 24];
/// Codes of rows whose arrays have 16 bits, as `RowKind::code_with` makes them: bfloat16, float16, and bfloat16 of rows of bfloat16.
const NARROW_ARRAYS: [usize; 3] = [3 | 16 << 24, 64 | 8 << 24, 100 | 18 << 24];
/// The second one is compiled with all formulas. No formula has code that depends on the architecture, so the others are compiled with those
/// in `SHAPES`.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];
/// One formula for each kind of step: two states, a step scaled by norms of the row, a mean over the row, no state.
const SHAPES: [&str; 4] = ["AdamStep<false>", "LambStep", "RowWiseAdamStep", "SgdStep<false, false>"];

/// A launch may be prepared while the previous one runs, so every kernel must call `begin` first.
#[test]
fn every_kernel_begins_by_waiting_for_the_launch_before_it() {
    for (source, _) in kernels(&[]) {
        let kernels = source.text.split("__global__").skip(1);
        for kernel in kernels {
            let body = kernel.split_once(") {\n").expect("a kernel has a body").1;
            assert!(
                body.starts_with("  begin();\n") || body.starts_with("  begin_meeting();\n"),
                "{}: {}",
                source.name,
                kernel.lines().next().unwrap_or_default()
            );
        }
    }
}

/// All memory must be requested in `memory.rs`, or in `window.rs` if ranks share it, so that `memory::times_asked` counts every request.
#[test]
fn memory_is_asked_for_in_known_places() {
    let mut folders = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut places = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let calls = ["malloc", "cuMemAlloc", "cuMemCreate", "cuMemHostAlloc", "alloc_zeros", ".alloc::<"];
            let asks = |line: &&str| calls.iter().any(|call| line.contains(call));
            places.extend(text.lines().filter(asks).map(|_| path.file_name().unwrap().to_owned()));
        }
    }
    places.sort();
    let expected = ["memory.rs", "memory.rs", "memory.rs", "window.rs"];
    assert_eq!(places, expected, "`malloc_sync`, `malloc_host` and twice `cuMemCreate`");
}

/// Compiles the kernels that access memory in another way on older devices.
#[test]
fn kernels_compile_for_older_devices() {
    let nvrtc = Nvrtc::load(&[]).unwrap();
    let own = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    let forward = own(&["find_records", "make_rows<0, 3, 64>", "make_rows<1, 3, 64>", "make_rows<2, 3, 64>"]);
    let backward = own(&[
        "update<0, AdamStep<false>, true, 3, 64>",
        "update<0, AdamStep<false>, true, 33554496>",
        "update<0, AdamStep<false>, true, 268435520, 268435457>",
        "merge<0, true, 3, 64>",
    ]);
    let sort = own(&["sort_pass<13, 11, 1>"]);
    let weights = own(&["weight_gradients<3, 64>"]);
    for (source, names) in [(&FORWARD, forward), (&BACKWARD, backward), (&WEIGHTS, weights), (&SORT, sort)] {
        nvrtc.compile(source, 75, &names).unwrap_or_else(|error| panic!("{}: {error}", source.name));
    }
}

#[test]
fn all_kernels_compile_for_all_architectures() {
    let nvrtc = Nvrtc::load(&[]).unwrap();
    let all: Vec<String> = Rule::variants().iter().map(type_name).collect();
    let of_shapes: Vec<String> = all.iter().filter(|rule| SHAPES.contains(&rule.as_str())).cloned().collect();
    assert_eq!(of_shapes.len(), SHAPES.len(), "{all:?}");
    std::thread::scope(|threads| {
        for (arch, rules) in ARCHITECTURES.into_iter().zip([&of_shapes, &all, &of_shapes]) {
            for (source, names) in kernels(rules) {
                let nvrtc = &nvrtc;
                threads.spawn(move || {
                    let cubin = nvrtc
                        .compile(source, arch, &names)
                        .unwrap_or_else(|error| panic!("sm_{arch}: {error}"));
                    assert!(cubin.code.starts_with(b"\x7fELF"));
                    assert_eq!(cubin.symbols.len(), names.len());
                    if let Some(folder) = std::env::var_os("SOK_CUBINS") {
                        keep(folder.as_ref(), &format!("{}.{arch}", source.name), &names, &cubin);
                    }
                });
            }
        }
    });
}

/// Returns the names of all kernels by source, with some sizes of rows and with these formulas.
fn kernels(rules: &[String]) -> Vec<(&'static Source, Vec<String>)> {
    let own = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    let mut forward =
        own(&["find_records", "settle_records", "make_rows<0, 8, 64, 1024>", "make_rows<2, 8, 64, 1024>"]);
    let mut weights = own(&["weight_gradients<8, 64, 1024>"]);
    let mut backward = own(&["sum_squares<0, 8, 64>", "sum_squares<2, 64>", "merge<0, true, 8, 64>"]);
    let mut missed = own(&["note_step", "start_rows"]);
    let mut general = own(&[
        "count_rows<8, 257>",
        "gather_piece<0, 8, 257>",
        "gather_piece<1, 64>",
        "gather_piece<2, 64>",
        "scatter_piece<0, 8, 257>",
        "scatter_piece<1, 64>",
        "scatter_piece<2, 64>",
        "fill_piece",
        "next_piece",
    ]);
    let mut table = own(&[
        "clear_index",
        "look_up",
        "settle_keys",
        "fill_missing",
        "read_records",
        "write_records",
        "lay_out",
        "erase_keys",
        "move_entries",
        "settle_entries",
    ]);
    for dim in DIMS {
        forward.extend([format!("make_rows<1, {dim}>"), format!("make_rows<2, {dim}>")]);
        weights.push(format!("weight_gradients<{dim}>"));
        backward.push(format!("update<0, AdamStep<false>, false, {dim}>"));
        backward.extend([format!("merge<1, false, {dim}>"), format!("merge<2, false, {dim}>")]);
        table.extend([format!("find_rows<{dim}, 4>"), format!("gather_rows<{dim}, 4>")]);
    }
    for row in NARROW {
        forward.extend([0, 1, 2].map(|bags| format!("make_rows<{bags}, {row}>")));
        weights.push(format!("weight_gradients<{row}>"));
        let shapes = rules.iter().filter(|rule| SHAPES.contains(&rule.as_str()));
        backward.extend(shapes.map(|rule| format!("update<0, {rule}, false, {row}>")));
        backward.push(format!("update_sums<2, AdamStep<false>, {row}>"));
        backward.push(format!("merge<1, true, {row}>"));
        table.extend([format!("find_rows<{row}, 4>"), format!("gather_rows<{row}, 4>")]);
        general.extend(["gather", "scatter"].map(|what| format!("{what}_piece<0, {row}>")));
    }
    for row in NARROW_ARRAYS {
        forward.extend([0, 1, 2].map(|bags| format!("make_rows<{bags}, {row}>")));
        weights.push(format!("weight_gradients<{row}>"));
        backward.push(format!("update<0, AdamStep<false>, false, {row}>"));
        backward.push(format!("update_in_turns<1, AdamStep<false>, true, {row}>"));
        backward.extend([format!("merge<0, false, {row}>"), format!("merge<1, true, {row}>")]);
        backward
            .extend([format!("sum_squares<0, {row}>"), format!("update_sums<0, AdamStep<false>, {row}>")]);
    }
    for rule in rules {
        backward.push(format!("update<1, {rule}, true, 64>"));
        backward.push(format!("update<0, {rule}, false, 8, 257>"));
        backward.push(format!("update_in_turns<0, {rule}, false, 8, 260>"));
        backward.extend([format!("update_sums<0, {rule}, 64>"), format!("update_sums<2, {rule}, 64>")]);
        missed.extend([format!("begin_steps<2, {rule}, 17>"), format!("catch_up_found<{rule}, 8, 257>")]);
    }
    for rule in SHAPES {
        missed.extend([0, 1].map(|source| format!("begin_steps<{source}, {rule}, 8, 64>")));
        missed.extend([64, 1024, NARROW[0], NARROW[3]].map(|row| format!("catch_up_all<{rule}, {row}>")));
    }
    backward.extend(own(&[
        "copy_gradients<2>",
        "copy_gradients<4>",
        "list_entries<0, 8, 64>",
        "list_entries<1, 64>",
        "list_entries<2, 64>",
    ]));
    let mut control = own(&[
        "deliver<960>",
        "deliver<2016>",
        "deliver<8128>",
        "write_ticket<960>",
        "write_ticket<2016>",
        "write_ticket<8128>",
        "check_finite<240, 0>",
        "check_finite<240, 1>",
        "check_finite<240, 2>",
        "resolve<1>",
        "resolve<60>",
        "prepare_weight",
        "finish_norms",
        "give_norm",
        "clip_factors",
    ]);
    control.push("prepare<1, GeneralStep>".into());
    control.push("prepare<40, GeneralStep>".into());
    control.extend(rules.iter().flat_map(|rule| [1, 40].map(|groups| format!("prepare<{groups}, {rule}>"))));
    let passes = [4, 8, 10, 13].into_iter().flat_map(|items| (9..=11).map(move |bits| (items, bits)));
    let sort = passes
        .flat_map(|(items, bits)| [1, 2].map(|stride| format!("sort_pass<{items}, {bits}, {stride}>")))
        .chain(own(&["count_digits"]))
        .collect();
    let ranks = own(&[
        "clear_slots",
        "claim_keys",
        "count_firsts",
        "place_firsts",
        "write_keys",
        "number_rows",
        "meet",
        "connect",
        "find_silent",
        "keep_id_counts",
        "share_out_of_vocabulary",
        "copy_parts",
        "narrow_parts",
        "widen_parts",
        "round_parts",
        "agree<1>",
        "agree<64>",
        "send_norms",
        "add_norms",
        "add_vectors",
    ]);
    let scores = own(&["take_uses", "count_records", "end_steps", "halve_scores", "read_uses", "write_uses"]);
    vec![
        (
            &AT_OWNER,
            own(&[
                "copy_all",
                "narrow_all<1>",
                "narrow_all<2>",
                "widen_all<1>",
                "widen_all<2>",
                "share_splits",
                "number_pooled",
            ]),
        ),
        (&SCORES, scores),
        (&SWEEP, own(&["choose_rows", "remove_chosen"])),
        (
            &CHANGES,
            own(&[
                "note_updated<0, 8, 64>",
                "note_updated<1, 64>",
                "note_updated<2, 64>",
                "note_changes",
                "read_changes",
                "list_changed",
                "copy_records",
            ]),
        ),
        (&EXPIRY, own(&["expire_rows<1>", "expire_rows<32>", "list_unlisted"])),
        (
            &ADMISSION,
            own(&[
                "count_sights",
                "admit_candidates",
                "settle_admitted",
                "end_admission",
                "list_absent",
                "halve_sights",
                "choose_forgotten",
                "forget_lowest",
                "list_candidates",
            ]),
        ),
        (&TABLE, table),
        (&SORT, sort),
        (&KEYS, own(&["list_keys"])),
        (&FORWARD, forward),
        (&BACKWARD, backward),
        (&GENERAL, general),
        (&GIVEN, own(&["keep_scores", "reset_scores", "raise_scores"])),
        (&MISSED, missed),
        (&WEIGHTS, weights),
        (&CONTROL, control),
        (&RANKS, ranks),
    ]
}

/// Writes the machine code, and which symbol in it is which kernel, for `benches/same_code.py`.
fn keep(folder: &std::path::Path, name: &str, names: &[String], cubin: &Cubin) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join(format!("{name}.cubin")), &cubin.code).unwrap();
    let lines = names.iter().zip(&cubin.symbols).map(|(name, symbol)| format!("{symbol}\t{name}\n"));
    std::fs::write(folder.join(format!("{name}.names")), lines.collect::<String>()).unwrap();
}
