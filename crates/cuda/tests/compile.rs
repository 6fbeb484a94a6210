//! Every kernel compiles for each generation of devices; needs NVRTC, no GPU.

use sok_cuda::kernels::{BACKWARD, FORWARD, SORT, TABLE};
use sok_cuda::nvrtc::{Nvrtc, Source};

const ARCHITECTURES: [u32; 3] = [80, 90, 100];

#[test]
fn all_kernels_compile_for_all_architectures() {
    let nvrtc = Nvrtc::load(&[]).unwrap();
    let kernels: [(&Source, &[&str]); 4] = [
        (
            &TABLE,
            &[
                "clear_index",
                "look_up<16, false>",
                "look_up<16, true>",
                "find_rows<16, 4>",
                "gather_rows<16, 4>",
            ],
        ),
        (&SORT, &["count_digits<2>", "count_digits<3>", "count_digits<4>", "sort_pass"]),
        (
            &FORWARD,
            &[
                "find_records<16, true>",
                "find_records<16, false>",
                "settle_records<16>",
                "gather<16>",
                "pool<16>",
            ],
        ),
        (
            &BACKWARD,
            &[
                "list_keys",
                "update<16, Adam<false>, false>",
                "update<32, Adam<true>, true>",
                "update<16, RmsProp<true, true>, false>",
                "update<16, Sgd, false>",
                "update<16, Momentum<true>, false>",
                "update<16, Adagrad, true>",
            ],
        ),
    ];
    for (source, names) in kernels {
        let names: Vec<_> = names.iter().map(|n| n.to_string()).collect();
        for arch in ARCHITECTURES {
            let cubin =
                nvrtc.compile(source, arch, &names).unwrap_or_else(|error| panic!("sm_{arch}: {error}"));
            assert!(cubin.code.starts_with(b"\x7fELF"));
            assert_eq!(cubin.symbols.len(), names.len());
        }
    }
}
