"""Autocast's operator lists, as they stand in aten/src/ATen/autocast_mode.h and autocast_mode.cpp of PyTorch 2.6 and 2.11 to 2.15.

A name the installed PyTorch does not have on its own list is passed over when the lists are registered.
"""

from __future__ import annotations


def names(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


# torchvision's own, run in float32 and given back in the dtype of their first argument (torchvision/csrc/ops/autocast, 0.26).
TORCHVISION = names("nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d")

# CUDA: run in the autocast dtype.
LOWER_PRECISION = names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention _cudnn_rnn
""")
# CUDA: refused.
BANNED = names("binary_cross_entropy")
# CUDA: run in float32.
FLOAT32 = names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    linalg_matrix_sqrth
""")
# Up to 2.11, whose own build registers neither; 2.15's does, and 2.12 to 2.14 are taken to be like it.
FLOAT32_TO_2_11 = tuple(name for name in FLOAT32 if name not in ("rms_norm", "linalg_matrix_sqrth"))
# CUDA: float32 as the output dtype unless one is given.
FLOAT32_SET_DTYPE = names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# CUDA: run in the widest dtype of the arguments.
PROMOTE = names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
# CPU.
CPU_LOWER_PRECISION = names("""
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm addbmm
    _addmm_activation linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention
""")
CPU_FLOAT32 = names("""
    avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar nanquantile
    nanquantile.scalar stft stft.center cdist grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d trace
    view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d
    max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss
    binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft
    fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_matrix_rank linalg_solve
    linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product
    linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve
    fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr
    linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex
    linalg_cond.p_str linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.atol_rtol_float linalg_matrix_sqrth
""")
CPU_PROMOTE = names("""
    stack cat index_copy
""")
# MPS: run in the autocast dtype.
MPS_LOWER_PRECISION = names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input convolution
    _mps_convolution prelu addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    lstm_cell scaled_dot_product_attention
""")
# MPS: run in float32, sums and softmax too, whatever dtype they are asked for.
MPS_FLOAT32 = names("""
    conv_transpose3d.input acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim batch_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod prod.dim_int softmax.int log_softmax.int
    cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# MPS: run in the widest dtype of the arguments.
MPS_PROMOTE = names("""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add
""")
