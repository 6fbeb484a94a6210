//! Macros that define constants, enums and structs in Rust, and write the same definitions for CUDA.

use std::fmt::Write;

/// A type that a field of a shared struct may have.
pub trait InCuda {
    /// Returns the CUDA declaration of a field of this type.
    fn declare(field: &str) -> String;
}

macro_rules! in_cuda {
    ($($type:ty: $name:literal),+) => {
        $(impl InCuda for $type {
            fn declare(field: &str) -> String {
                format!("{} {field}", $name)
            }
        })+
    };
}
in_cuda! { u32: "u32", u64: "u64", f32: "float", f64: "double" }

impl<T: InCuda, const N: usize> InCuda for [T; N] {
    fn declare(field: &str) -> String {
        T::declare(&format!("{field}[{N}]"))
    }
}

/// Defines constants, and `constants()`, which appends them to a CUDA header.
macro_rules! constants {
    ($($(#[doc = $doc:literal])* pub const $name:ident: $type:ident = $value:expr;)*) => {
        $($(#[doc = $doc])* pub const $name: $type = $value;)*

        pub fn constants(text: &mut String) {
            $(
                let in_cuda = if stringify!($type) == "u64" { "u64" } else { "u32" };
                let _ = writeln!(text, "constexpr {in_cuda} {} = {}u;", stringify!($name), $name);
            )*
        }
    };
}

/// Defines enums of 32 bits, and `enums()`, which appends them to a CUDA header.
macro_rules! enums {
    ($($(#[doc = $doc:literal])* pub enum $name:ident {
        $($(#[doc = $variant_doc:literal])* $variant:ident = $number:literal as $in_cuda:ident,)*
    })*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
            #[repr(u32)]
            pub enum $name { $($(#[doc = $variant_doc])* $variant = $number,)* }
        )*

        pub fn enums(text: &mut String) {
            $(enum_text(text, stringify!($name), &[$((stringify!($in_cuda), $number)),*]);)*
        }
    };
}

/// Defines structs, and `structs()`, which appends them to a CUDA header.
macro_rules! structs {
    ($($(#[doc = $doc:literal])* $(#[repr(align($align:literal))])? pub struct $name:ident {
        $($(#[doc = $field_doc:literal])* pub $field:ident: $type:ty $(as $pointer:literal)?,)*
    })*) => {
        $(
            $(#[doc = $doc])*
            #[repr(C)]
            $(#[repr(align($align))])?
            #[derive(Clone, Copy, Debug, PartialEq)]
            pub struct $name { $($(#[doc = $field_doc])* pub $field: $type,)* }

            const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "padding must be a field");

            // SAFETY: All fields are numbers, and the assertion above excludes hidden padding.
            unsafe impl Plain for $name {}

            impl Default for $name {
                /// All zeros.
                fn default() -> $name {
                    // SAFETY: All fields are numbers, of which every bit pattern is a value.
                    unsafe { std::mem::zeroed() }
                }
            }

            impl InCuda for $name {
                fn declare(field: &str) -> String {
                    format!("{} {field}", stringify!($name))
                }
            }
        )*

        pub fn structs(text: &mut String) {
            $(
                let align: Option<usize> = [$($align)?].first().copied();
                let fields = [$((
                    stringify!($field),
                    structs!(@declare $field, $type $(, $pointer)?),
                    size_of::<$type>(),
                )),*];
                struct_text(text, stringify!($name), align, size_of::<$name>(), &fields);
            )*
        }
    };
    (@declare $field:ident, $type:ty) => { <$type as InCuda>::declare(stringify!($field)) };
    (@declare $field:ident, $type:ty, $pointer:literal) => { format!("{} {}", $pointer, stringify!($field)) };
}

/// Appends the definition of an enum. `variants`: name, number.
pub fn enum_text(text: &mut String, name: &str, variants: &[(&str, u32)]) {
    let variants: Vec<_> = variants.iter().map(|(name, number)| format!("{name} = {number}")).collect();
    let _ = writeln!(text, "enum {name} : u32 {{ {} }};", variants.join(", "));
}

/// Appends the definition of a struct. `fields`: name, declaration, size.
pub fn struct_text(
    text: &mut String,
    name: &str,
    align: Option<usize>,
    size: usize,
    fields: &[(&str, String, usize)],
) {
    // A field may point to a struct that is defined later.
    for (_, declaration, _) in fields.iter().filter(|(_, declaration, _)| declaration.contains('*')) {
        let pointed = declaration.trim_start_matches("const ").split('*').next().unwrap_or_default();
        if pointed.starts_with(char::is_uppercase) {
            let _ = writeln!(text, "struct {pointed};");
        }
    }
    let align = align.map(|align| format!("alignas({align}) ")).unwrap_or_default();
    let _ = writeln!(text, "struct {align}{name} {{");
    fields.iter().for_each(|(_, declaration, _)| {
        let _ = writeln!(text, "  {declaration};");
    });
    let _ = writeln!(text, "}};\nstatic_assert(sizeof({name}) == {size}, \"as in Rust\");");
    // There is no padding, so all offsets are equal if all sizes of fields are equal.
    for (field, _, size) in fields {
        let _ = writeln!(text, "static_assert(sizeof({name}::{field}) == {size}, \"as in Rust\");");
    }
}
