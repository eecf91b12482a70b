#pragma once

// Put in front of ggml-vulkan's sources. Vulkan headers older than 1.3.270, such as Debian 12's, lack the extension
// VK_EXT_layer_settings, which is all that ggml needs beyond them, and only to set an option of the validation layer.

#ifdef __cplusplus

#include <cstdint>
#include <vector>

#include <vulkan/vulkan_core.h>

#ifndef VK_EXT_layer_settings

namespace vk {

enum class LayerSettingTypeEXT : int32_t {
    eBool32 = 0,
};

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType         sType = (VkStructureType) 1000496000;
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;

    LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings) :
        settingCount((uint32_t) settings.size()), pSettings(settings.data()) {}
};

} // namespace vk

#endif

#endif
