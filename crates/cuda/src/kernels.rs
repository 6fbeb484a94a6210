//! The kernels' sources, embedded.

use crate::nvrtc::Source;

const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../kernels/types.cuh")),
    ("math.cuh", include_str!("../kernels/math.cuh")),
    ("initializer.cuh", include_str!("../kernels/initializer.cuh")),
    ("index.cuh", include_str!("../kernels/index.cuh")),
    ("optimizer.cuh", include_str!("../kernels/optimizer.cuh")),
    ("keys.cuh", include_str!("../kernels/keys.cuh")),
    ("records.cuh", include_str!("../kernels/records.cuh")),
    ("sort.cuh", include_str!("../kernels/sort.cuh")),
    ("stage.cuh", include_str!("../kernels/stage.cuh")),
    ("step.cuh", include_str!("../kernels/step.cuh")),
];

pub const TABLE: Source =
    Source { name: "table.cu", text: include_str!("../kernels/table.cu"), headers: HEADERS };
pub const SORT: Source =
    Source { name: "sort.cu", text: include_str!("../kernels/sort.cu"), headers: HEADERS };
pub const KEYS: Source =
    Source { name: "keys.cu", text: include_str!("../kernels/keys.cu"), headers: HEADERS };
pub const FORWARD: Source =
    Source { name: "forward.cu", text: include_str!("../kernels/forward.cu"), headers: HEADERS };
pub const BACKWARD: Source =
    Source { name: "backward.cu", text: include_str!("../kernels/backward.cu"), headers: HEADERS };
pub const WEIGHTS: Source =
    Source { name: "weights.cu", text: include_str!("../kernels/weights.cu"), headers: HEADERS };
pub const CONTROL: Source =
    Source { name: "control.cu", text: include_str!("../kernels/control.cu"), headers: HEADERS };
