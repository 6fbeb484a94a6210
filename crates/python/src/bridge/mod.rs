pub mod torch;
