//! Every kernel compiles for each generation of devices; needs NVRTC, no GPU.

use sok_cuda::kernels::{BACKWARD, FORWARD, SORT, TABLE};
use sok_cuda::nvrtc::Nvrtc;

const DIMS: [usize; 9] = [1, 3, 8, 17, 64, 100, 128, 257, 1024];
const RULES: [&str; 11] = [
    "Sgd",
    "Momentum<false>",
    "Momentum<true>",
    "Adam<false>",
    "Adam<true>",
    "Adagrad",
    "RowWiseAdagrad",
    "RmsProp<false, false>",
    "RmsProp<true, true>",
    "Ftrl<true>",
    "Ftrl<false>",
];
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

#[test]
fn all_kernels_compile_for_all_architectures() {
    let nvrtc = Nvrtc::load(&[]).unwrap();
    let mut forward = Vec::new();
    let mut backward = vec!["list_keys".to_string()];
    for dim in DIMS {
        for name in [
            "find_records<DIM, true>",
            "find_records<DIM, false>",
            "settle_records<DIM>",
            "gather<DIM>",
            "pool<DIM>",
        ] {
            forward.push(name.replace("DIM", &dim.to_string()));
        }
        backward.push(format!("update<{dim}, Adam<false>, false>"));
    }
    for rule in RULES {
        backward.push(format!("update<64, {rule}, true>"));
        backward.push(format!("update<257, {rule}, false>"));
    }
    let own = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
    let kernels = [
        (
            &TABLE,
            own(&[
                "clear_index",
                "look_up<64, false>",
                "look_up<64, true>",
                "find_rows<64, 4>",
                "gather_rows<64, 4>",
            ]),
        ),
        (&SORT, own(&["count_digits<2>", "count_digits<3>", "count_digits<4>", "sort_pass"])),
        (&FORWARD, forward),
        (&BACKWARD, backward),
    ];
    std::thread::scope(|threads| {
        for (source, names) in &kernels {
            for arch in ARCHITECTURES {
                let nvrtc = &nvrtc;
                threads.spawn(move || {
                    let cubin = nvrtc
                        .compile(source, arch, names)
                        .unwrap_or_else(|error| panic!("sm_{arch}: {error}"));
                    assert!(cubin.code.starts_with(b"\x7fELF"));
                    assert_eq!(cubin.symbols.len(), names.len());
                });
            }
        }
    });
}
